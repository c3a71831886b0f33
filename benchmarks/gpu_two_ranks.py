"""Two ranks on one GPU: FSDP2 over gloo with tensors of the GPU, against one rank.

    python benchmarks/gpu_two_ranks.py [--quick] [--json two_ranks.json]

NCCL refuses two ranks on a GPU; gloo copies through host memory. So this says nothing of speed, but
runs what several GPUs run: copies of FSDP2, pinned buffers, and shards of unequal size, because the
MLP and the vocabulary have an odd number of rows. Each way trains a small QDoRA, a row for each
rank, and must give the losses of one rank with both rows.

    two_ranks_WAY_loss_difference    the largest of its steps
    two_ranks_WAY_peak_bytes         of rank 0
    two_ranks_loss_difference        the largest of all ways; at most 2e-2
    two_ranks_failed                 ways that ended with an error; the output has it
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_train_step import RECIPE, ROW, Size, our_config, random_batch, recipe_step
from benchmarks.timing import base_arguments, tell, write_figures
from qfsdp.config.recipe_files import load_recipe
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.training.memory_usage import peak_memory_bytes
from qfsdp.training.steps import StepClock

VOCABULARY, STEPS, LIMIT = 577, 4, 2e-2
LARGE: dict[str, Any] = {"hidden_size": 1152, "intermediate_size": 2817, "num_hidden_layers": 6}
LARGE |= {"max_position_embeddings": 4096}
WAYS = {
    "full_shard": [],
    "by_linear": ["sharding.wrap=linear"],
    "shard_grad_op": ["sharding.strategy=shard_grad_op"],
    "hybrid": ["sharding.strategy=hybrid_full_shard", "sharding.replicate=2", "sharding.shard=1"],
    "split_vocabulary": ["sharding.vocabulary=split"],
    "base_on_host": ["sharding.offload_base=cpu"],
    "cpu_offload": ["sharding.cpu_offload=true"],
}


def join(rank: int, ranks: int, folder: Path) -> None:
    """Joins the other ranks over gloo, also for tensors of a GPU. Named for each device: where the
    group of all ranks is "gloo" and there is a GPU, a mesh makes one of NCCL (pytorch#132709)."""
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=ranks)


def train(rank: int, ranks: int, folder: Path, words: list[str], quick: bool) -> list[float]:
    """The losses of a few steps, and the peak in bytes. Row r of a batch is that of rank r."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")  # of one GPU
    if ranks > 1:
        join(rank, ranks, folder)
    args = argparse.Namespace(
        contestant="ours_qdora", words=words, packed=False, estimate=True, quick=quick, row=ROW
    )
    recipe, cfg = our_config(args, folder, rows=1)
    world = recipe.init_world(cfg.sharding, cfg.distributed)
    model = recipe.load_model(cfg, world).train()
    optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(model))
    step = recipe_step(recipe, model, optimizer, world, StepClock(world.device))
    mine = slice(rank, rank + 1) if ranks > 1 else slice(None)
    losses = []
    for index in range(2 if quick else STEPS):
        batch = random_batch(Size(2, 32 if quick else 512), VOCABULARY, index)
        losses.append(step(*(rows[mine] for rows in batch)))
    return [*losses, float(peak_memory_bytes(world.device))]


def write_model(folder: Path, quick: bool) -> None:
    """In a process of its own: these imports ask for a GPU, and who has asked cannot be forked."""
    from tests.tiny import write_tiny_model

    write_tiny_model(folder, **({} if quick else LARGE))


def work(rank: int, ranks: int, folder: Path, words: list[str], quick: bool) -> None:
    """A rank; its losses go to a file. Ends at once: gloo's threads may abort a usual end."""
    status = 0
    faulthandler.enable()
    try:
        torch.save(train(rank, ranks, folder, words, quick), folder / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def run(ranks: int, folder: Path, words: list[str], quick: bool) -> list[float] | None:
    """Losses and peak of rank 0; None if a rank failed. Ranks are forks: no GPU is in use yet."""
    for name in ("store", *(f"{rank}.pt" for rank in range(ranks))):
        (folder / name).unlink(missing_ok=True)
    given = (ranks, folder, words, quick)
    context = mp.get_context("fork")
    processes = [context.Process(target=work, args=(rank, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    waiting = list(processes)
    while waiting:
        wait([process.sentinel for process in waiting])
        ended = [process for process in waiting if not process.is_alive()]
        waiting = [process for process in waiting if process.is_alive()]
        if any(process.exitcode for process in ended):  # the other waits for it
            for process in waiting:
                process.kill()
    if any(codes := [process.exitcode for process in processes]):
        print(f"exit statuses of the ranks: {codes}", flush=True)
        return None
    found: list[float] = torch.load(folder / "0.pt")
    return found


def main() -> None:
    args = base_arguments(__doc__).parse_args()
    torch.set_num_threads(1)  # forks of a process with threads of OpenMP wait for these for ever
    found: dict[str, float] = {}
    load_recipe(RECIPE)  # its imports are those of all ranks
    with tempfile.TemporaryDirectory() as work_folder:
        folder = Path(work_folder)
        writer = mp.get_context("fork").Process(target=write_model, args=(folder, args.quick))
        writer.start()
        writer.join()
        one = run(1, folder, [], args.quick)
        if one is None:
            raise SystemExit("error: one rank failed")
        found |= {"two_ranks_loss_difference": 0.0, "two_ranks_failed": 0.0}
        for way, words in WAYS.items():
            both = run(2, folder, words, args.quick)
            if both is None:
                found["two_ranks_failed"] += 1
                print(f"{way}: failed")
            else:
                away = max(abs(a - b) for a, b in zip(both[:-1], one[:-1], strict=True))
                found[f"two_ranks_{way}_loss_difference"] = away
                found[f"two_ranks_{way}_peak_bytes"] = both[-1]
                found["two_ranks_loss_difference"] = max(found["two_ranks_loss_difference"], away)
            write_figures(args.json, found)
    tell(found, args.json)
    if found["two_ranks_failed"] or found["two_ranks_loss_difference"] > LIMIT:
        raise SystemExit("error: two ranks do not train as one does")


if __name__ == "__main__":
    main()
