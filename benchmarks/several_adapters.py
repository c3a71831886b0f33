"""Seconds per adapter of N adapters in one run against N runs of one adapter each.

    OMP_NUM_THREADS=1 python benchmarks/several_adapters.py [--quick] [--json several.json]

Steps of recipes/several_adapters with 1, 2, 4 and 8 adapters take turns with steps of
recipes/qdora_distributed. The model has two layers with SmolLM2-135M's shapes, random NF4 weights
and a vocabulary of 1,024. Every adapter is LoRA of rank 16 and has one row. One process runs. With
short rows dequantizing takes most of a step, with long rows the products do.

    TOKENS/N_over_single_time    seconds of a step / N over those of a single run; below 1 it pays
    TOKENS/N_over_single_cpu     the same of processor seconds; compare these on a busy machine
    TOKENS/single_seconds        a step of a single run

Nothing is sharded here. On several ranks a step also gathers the base once, and not N times.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.tiles import write_layer
from benchmarks.timing import arguments, ratios, tell, usual_dtype
from qfsdp.config.component import Component
from qfsdp.data import Batch
from qfsdp.data.joined import joined
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.training.several import OneConfig, build_optimizers
from tests.tiny import load_recipe

ADAMW = Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True})


def build_step(folder: Path, tokens: int, count: int, device: str) -> Callable[[], object]:
    """A function that takes one train step of `count` adapters in one run; 0: a single run."""
    recipe = load_recipe("several_adapters" if count else "qdora_distributed")
    given: dict[str, Any] = dict.fromkeys(("tokenizer", "dataset"))
    given |= {"output_dir": "unused", "optimizer": ADAMW}
    if count:
        given["adapters"] = {f"a{at}": OneConfig("lora", 16, 32) for at in range(count)}
    else:
        given["adapter"] = AdapterConfig("lora", 16, 32)
    model_config = recipe.ModelConfig(str(folder), dtype=usual_dtype(device))
    cfg = recipe.Config(model=model_config, max_seq_len=tokens, **given)
    world = recipe.init_world()
    clock, model = recipe.StepClock(world.device), recipe.load_model(cfg, world)
    row = torch.arange(tokens).mul_(7919).remainder_(1024).unsqueeze(0)
    batch = Batch(row, row, tokens)
    if not count:
        groups = recipe.parameter_groups(model, cfg.adapter)
        optimizer = recipe.build_optimizer(ADAMW, groups)
        return lambda: recipe.train_step(model, optimizer, None, [batch], 1.0, world, clock)
    optimizers, schedules = build_optimizers(cfg, model, dict.fromkeys(cfg.adapters, 1))
    batches = [joined([batch] * count)]
    return lambda: recipe.train_step(model, optimizers, schedules, batches, 1.0, world, clock)


def main() -> None:
    args = arguments(__doc__).parse_args()
    counts, rounds = ((0, 1, 4), 3) if args.quick else ((0, 1, 2, 4, 8), args.repeat)
    clocks = {"time": time.perf_counter, "cpu": time.process_time}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = write_layer(Path(place), layers=2)
        for tokens in (16, 64, 256):
            steps = {count: build_step(folder, tokens, count, args.device) for count in counts}
            spent = {(name, count): list[float]() for name in clocks for count in counts}
            for turn in range(rounds + 1):  # the first compiles and allocates
                for count, step in steps.items():
                    before = {name: clock() for name, clock in clocks.items()}
                    step()
                    for name, clock in clocks.items() if turn else ():
                        spent[name, count].append((clock() - before[name]) / max(count, 1))
            for count in counts[1:]:
                for name in clocks:
                    pair = spent[name, count], spent[name, 0]
                    figures |= ratios(f"{tokens}/{count}_over_single_{name}", *pair)
            figures[f"{tokens}/single_seconds"] = statistics.median(spent["time", 0])
    tell(figures, args.json)


if __name__ == "__main__":
    main()
