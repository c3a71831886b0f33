"""torchtune's loading of a sharded LoRA or QLoRA base, for `benchmarks/load_base.py`.

    python benchmarks/load_base_torchtune.py FOLDER RESULT.json nf4|bf16

Takes the steps of torchtune 0.6.1's `lora_finetune_distributed` for a Llama-3-70B-shaped folder on
two ranks: model on the meta device, `shard_model`, the checkpointer's state dict,
`load_from_full_model_state_dict`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load_base import drop_from_page_cache, files_of, touch_memory
from benchmarks.memory import PeakMemory

RANKS = 2


def load_rank(rank: int, folder: str, result: str, base: str) -> None:
    from torchtune import training
    from torchtune.models.llama3 import lora_llama3

    torch.set_num_threads(1)
    store = dist.FileStore(f"{result}.store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    config = json.loads((Path(folder) / "config.json").read_text())
    with training.set_default_dtype(torch.bfloat16), torch.device("meta"):
        model = lora_llama3(
            ["q_proj", "k_proj", "v_proj", "output_proj"],
            apply_lora_to_mlp=True,
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            embed_dim=config["hidden_size"],
            max_seq_len=config["max_position_embeddings"],
            intermediate_dim=config["intermediate_size"],
            lora_rank=16,
            lora_alpha=32,
            quantize_base=base == "nf4",
        )
    training.shard_model(
        model=model,
        shard_conditions=[lambda name, _: name.startswith("layers.") and name.count(".") == 1],
        cpu_offload=False,
        reshard_after_forward=True,
        dp_mesh=init_device_mesh("cpu", (RANKS,)),
    )
    touch_memory(sum(p.numel() * p.element_size() for p in model.parameters()) // RANKS)
    if rank == 0:
        drop_from_page_cache(Path(folder))
    dist.barrier()
    memory, since = PeakMemory(), time.perf_counter()
    checkpointer = training.FullModelHFCheckpointer(
        checkpoint_dir=folder,
        checkpoint_files=[file.name for file in files_of(Path(folder))],
        model_type="LLAMA3",
        output_dir=f"{result}.output",
    )
    state = checkpointer.load_checkpoint()["model"]
    device = torch.device("cpu")
    training.load_from_full_model_state_dict(model, state, device, strict=False)
    seconds, peak = time.perf_counter() - since, memory.stop()
    shard = sum(p.to_local().nbytes for p in model.parameters() if p.device.type != "meta")
    Path(f"{result}.{rank}").write_text(json.dumps([seconds, peak - shard, shard]))
    dist.barrier()
    os._exit(0)


def main() -> None:
    folder, result, base = sys.argv[1:]
    mp.start_processes(load_rank, (folder, result, base), nprocs=RANKS, start_method="spawn")
    ranks = [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(RANKS)]
    seconds, peak, shard = (max(figures) for figures in zip(*ranks, strict=True))
    Path(result).write_text(json.dumps({"seconds": seconds, "peak": peak, "shard": shard}))


if __name__ == "__main__":
    main()
