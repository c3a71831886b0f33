"""Packed rows that two ranks share (`sharding.context_parallel: 2`) against a row for each rank.

    python benchmarks/shared_rows.py [--quick] [--json shared.json] [--tokens 32768] [--layers 30]

An update of two rows with SmolLM2-135M's shapes and random weights (NF4, LoRA of rank 16, full
checkpointing, tiles) on two processes of one thread, over gloo. With N = 1 each rank has a row of
its own. With N = 2 each has half of both rows, one after the other. Documents have 200 to 4,000
tokens, so some are cut. Figures are of the second update, and of the rank with the larger number.

    N1_cpu, N2_cpu               processor seconds
    N1_seconds, N2_seconds       seconds; on a busy machine processor seconds say more
    N1_memory, N2_memory         bytes that the update adds to the process, at its peak
    N1_estimated, N2_estimated   the same by the estimate
    loss_difference              between N = 1 and N = 2, in the first update
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.tiles import write_layer
from benchmarks.timing import base_arguments, tell, usual_dtype
from qfsdp.config.component import Component
from qfsdp.data import Batch, collate
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.planning.estimate import estimate
from qfsdp.training.memory_usage import peak_memory_bytes, reset_peak_memory
from tests.ranks import run_ranks
from tests.tiny import load_recipe

RANKS = 2


def config(folder: str, tokens: int, parts: int) -> Any:
    recipe = load_recipe()
    model = recipe.ModelConfig(folder, dtype=usual_dtype("cpu"), max_positions=tokens)
    return recipe.Config(
        output_dir="unused",
        model=model,
        tokenizer=None,
        dataset=None,
        optimizer=Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True}),
        adapter=AdapterConfig("lora", 16, 32),
        sharding=ShardingConfig(context_parallel=parts),
        activation=ActivationConfig("full", tile_tokens="auto"),
        batch_size=1,
        gradient_accumulation_steps=parts,
        max_seq_len=tokens,
        packed=True,
    )


def rows(tokens: int) -> list[Batch]:
    """Two packed rows."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(RANKS):
        lengths: list[int] = []
        while sum(lengths) < tokens:
            drawn = int(torch.randint(200, 4001, (), generator=generator))
            lengths.append(min(drawn, tokens - sum(lengths)))
        ids = torch.randint(0, 1024, (tokens,), generator=generator)
        pack = {"tokens": ids, "labels": ids, "lengths": lengths}
        found.append(collate([pack], pad_id=0, max_seq_len=tokens, parts=RANKS))
    return found


def updates(folder: str, tokens: int, parts: int) -> dict[str, float]:
    """Figures of this rank."""
    recipe, cfg = load_recipe(), config(folder, tokens, parts)
    world = recipe.init_world(cfg.sharding)
    model = recipe.load_model(cfg, world)
    optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(model))
    given = rows(tokens)
    batches = [given[world.rank]] if parts == 1 else [row.cut(world.rank, parts) for row in given]
    losses = []
    for _ in range(2):
        reset_peak_memory(world.device)
        held, cpu, wall = peak_memory_bytes(world.device), time.process_time(), time.perf_counter()
        clock = recipe.StepClock(world.device)
        losses.append(recipe.train_step(model, optimizer, None, batches, 1.0, world, clock)["loss"])
    return {
        "cpu": time.process_time() - cpu,
        "seconds": time.perf_counter() - wall,
        "memory": peak_memory_bytes(world.device) - held,
        "loss": losses[0],
    }


def main() -> None:
    parser = base_arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=30)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.layers = 4096, 1
    figures, losses, recipe = {}, [], load_recipe()
    with tempfile.TemporaryDirectory() as folder:
        write_layer(Path(folder), args.layers)
        for parts in (1, RANKS):
            of_ranks = run_ranks(RANKS, updates, folder, args.tokens, parts)
            losses.append(of_ranks[0]["loss"])
            for name in ("cpu", "seconds", "memory"):
                figures[f"N{parts}_{name}"] = max(one[name] for one in of_ranks)
            cfg = replace(config(folder, args.tokens, parts), preflight=False)
            found = estimate(recipe.build_model, recipe.train_step, cfg, RANKS, target="cpu")
            figures[f"N{parts}_estimated"] = found.peak - found.steady
    figures["loss_difference"] = abs(losses[0] - losses[1])
    tell(figures, args.json)


if __name__ == "__main__":
    main()
