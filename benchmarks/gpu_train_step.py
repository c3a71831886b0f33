"""Train steps of a random model with Llama-3-8B's shapes: ours, or PEFT + bitsandbytes.

    python benchmarks/gpu_train_step.py CONTESTANT [--quick] [--tokens 2048 8192] [--kernels]
                                        [--json FILE]

CONTESTANT is one of ours_qlora, ours_qdora, ours_lora (bf16 base), peft_qlora, peft_qdora. Weights
are drawn on the device and are the same for all, so nothing is read from disk. Our steps are the
recipe's `train_step` with compiled layers; PEFT's run under bf16 autocast with fused AdamW. Rank 16
on all linears, rows of 2048 tokens with a target at every position, no activation checkpointing.
`--kernels` prints a table of the kernels of one more step. `--quick` tries the script on a CPU: two
small layers, two steps, 2048 tokens (a bf16 step of PEFT takes 11 s on a CPU without bf16
products).

Keys, for every number of tokens in a micro-batch that fits into memory:
`CONTESTANT_8192_tokens_per_second`, `_seconds` (median of the steps), `_peak_bytes` (allocated),
`_first_loss`, `_last_loss`; for ours also `_model_flops_utilization`,
`_hardware_flops_utilization` and `_seconds/PHASE`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.train_step_worker import (
    ADAPTED,
    ALPHA,
    CLIP,
    LEARNING_RATE,
    Step,
    training_step,
)
from qfsdp.cli.recipes import load_recipe
from qfsdp.data.loader import Batch
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.world import World
from qfsdp.modules.adapter_config import AdapterConfig
from qfsdp.modules.adapters import add_adapters, base_parameters, init_adapters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.memory_usage import peak_memory_bytes
from qfsdp.training.throughput import StepClock, matmul_rate, step_flops, utilization

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY = LLAMA_8B | {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ROOT = Path(__file__).parent.parent
ROW, RANK = 2048, 16
WARMUP = 3  # the first step compiles, the second still allocates


def random_weight(name: str, like: Tensor, device: torch.device) -> Tensor:
    """A bf16 weight that depends on its name only."""
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16, device=device)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.bfloat16, device=device)
    return drawn.mul_(0.02)


def ours(
    kind: str, config: dict[str, Any], device: torch.device, clock: StepClock
) -> tuple[Step, Decoder]:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(config)).bfloat16()
    quantize_linears(model, QuantizationConfig("nf4" if kind.startswith("q") else "none"))
    method = "dora" if kind.endswith("dora") else "lora"
    add_adapters(model, AdapterConfig(method, RANK, ALPHA))  # type: ignore[arg-type]
    model.compile_layers()
    for name, param in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        empty = torch.empty_like(param, device=device)
        made = nn.Parameter(empty, requires_grad=param.requires_grad)
        setattr(owner, name.rpartition(".")[2], made)
    with torch.no_grad():
        for name, param in base_parameters(model):
            weight = random_weight(name, param, device)
            if isinstance(param.data, QuantizedTensor):
                param.data.quantize_(weight, name)
            else:
                param.copy_(weight)
    init_adapters(model, seed=0)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=LEARNING_RATE, fused=True)
    recipe = load_recipe(ROOT / "recipes/qdora_distributed.py")
    world = World(device)

    def step(tokens: Tensor, labels: Tensor) -> float:
        batches = [Batch(tokens, labels, tokens.numel())]
        return recipe.train_step(model, optimizer, None, batches, CLIP, world, clock)["loss"]

    return step, model.train()


def peft(kind: str, config: dict[str, Any], device: torch.device) -> Step:
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {key: value for key, value in config.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": LLAMA_8B["rope_theta"]}
    torch.set_default_dtype(torch.bfloat16)
    with device:
        base = LlamaForCausalLM(LlamaConfig(**config, rope_parameters=rope, use_cache=False))
    torch.set_default_dtype(torch.float32)
    for name, param in base.named_parameters():
        param.data = random_weight(name, param, device)
    for name, module in list(base.model.named_modules()):
        if isinstance(module, nn.Linear):
            linear = Linear4bit(
                module.in_features, module.out_features, False, torch.bfloat16, True, "nf4"
            )
            linear.weight = Params4bit(
                module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            )
            parent = base.model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], linear.to(device))
    adapter = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=ADAPTED, use_dora=kind.endswith("dora")
    )
    model = get_peft_model(base, adapter).train()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return training_step(model, loss, device.type)


def random_batch(rows: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, `[rows, ROW]` each; every position has a target."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocabulary, (rows, ROW + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def measure(
    step: Step, rows: int, vocabulary: int, steps: int, device: torch.device, clock: StepClock
) -> dict[str, float]:
    """Median seconds, peak bytes and losses of `steps` steps after the warm-up."""
    seconds, losses = [], []
    for index in range(WARMUP + steps):
        if index == WARMUP:
            clock.seconds()
            if device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats()
        batch = random_batch(rows, vocabulary, index)
        since = time.perf_counter()
        losses.append(step(*batch))
        seconds.append(time.perf_counter() - since)  # reading the loss waited for the device
    median = statistics.median(seconds[WARMUP:])
    return {
        "seconds": median,
        "warmup_seconds": sum(seconds[:WARMUP]),
        "tokens_per_second": rows * ROW / median,
        "peak_bytes": peak_memory_bytes(device),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    } | {f"seconds/{phase}": spent / steps for phase, spent in clock.seconds().items()}


def print_kernels(step: Step, rows: int, vocabulary: int) -> None:
    """Prints the 30 kernels (operations, on a CPU) that take most of one step."""
    batch = random_batch(rows, vocabulary, seed=0)
    cuda = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as profiler:
        step(*batch)
    most = "self_device_time_total" if cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    print(averages.table(sort_by=most, row_limit=30, max_name_column_width=80), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("contestant")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 2048 8192")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    steps, sizes = (2, [2048]) if args.quick else (8, [2048, 8192])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TINY if args.quick else LLAMA_8B
    library, _, kind = args.contestant.partition("_")
    found: dict[str, float] = {}
    clock, model = StepClock(device), None
    rate = matmul_rate(device, torch.bfloat16)
    since = time.perf_counter()
    if library == "ours":
        step, model = ours(kind, config, device, clock)
    else:
        step = peft(kind, config, device)
    found[f"{args.contestant}_load_seconds"] = time.perf_counter() - since
    for tokens in args.tokens or sizes:
        rows = max(1, tokens // ROW)
        try:
            of_size = measure(step, rows, config["vocab_size"], steps, device, clock)
        except torch.OutOfMemoryError as error:  # PEFT allocates 76 GB at 8,192 tokens
            print(f"{args.contestant}, {tokens} tokens: out of memory: {error}")
            continue
        if model is not None:
            flops = step_flops(model, [ROW] * rows, rows * ROW)
            of_size |= utilization(flops, of_size["seconds"], rate)
        if args.kernels:
            print_kernels(step, rows, config["vocab_size"])
        found |= {f"{args.contestant}_{tokens}_{key}": value for key, value in of_size.items()}
    found["matmul_flops_per_second"] = rate
    for key, value in found.items():
        print(f"{key} {value:.5g}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
