"""Train steps of an 8B-shaped QLoRA with its base on the GPU, in host memory, and on disk.

    python benchmarks/gpu_offload.py [--quick] [--json offload.json]

Writes a quantized folder with the shapes of Llama-3-8B (32 equal layers, 5 GB; removed at the end)
into TMPDIR, and loads it as the recipe does. Rows of 2,048 tokens, 8,192 per micro-batch, rank 16,
compiled layers. Tiers run one after the other; figures are written before losses are compared,
which must be equal within 2e-2.

    TIER_tokens_per_second, TIER_seconds, TIER_peak_bytes, TIER_load_seconds, TIER_last_loss
    cpu_over_resident_tokens, disk_over_resident_tokens, cpu_over_resident_memory
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_train_step import ROW, TINY, WARMUP, measure, our_config, recipe_step, size_of
from benchmarks.offload_tiers import write_quantized_model
from benchmarks.timing import base_arguments, tell, write_figures
from benchmarks.train_step_worker import LEARNING_RATE
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.planning.known_models import find_config
from qfsdp.training.steps import StepClock

TIERS = {"resident": "none", "cpu": "cpu", "disk": "disk"}


def measure_tier(tier: str, folder: Path, sizes: dict[str, Any], quick: bool) -> dict[str, float]:
    words = [f"sharding.offload_base={TIERS[tier]}"]
    args = argparse.Namespace(
        contestant="ours_qlora", words=words, packed=False, estimate=False, quick=quick, row=ROW
    )
    recipe, cfg = our_config(args, folder, rows=1)
    since = time.perf_counter()
    world = recipe.init_world(cfg.sharding, cfg.distributed)
    model = recipe.load_model(cfg, world)
    load = time.perf_counter() - since
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=LEARNING_RATE, fused=True)
    clock = StepClock(world.device)
    step = recipe_step(recipe, model, optimizer, world, clock)
    size, steps = size_of(8192, args), 1 if quick else WARMUP
    found = measure(step, size, sizes["vocab_size"], steps, clock)
    return {f"{tier}_load_seconds": load} | {f"{tier}_{key}": v for key, v in found.items()}


def main() -> None:
    args = base_arguments(__doc__).parse_args()
    sizes = find_config("Llama-3-8B") | (TINY if args.quick else {})
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as work:
        folder, layers = Path(work), sizes["num_hidden_layers"]
        found["base_bytes"] = write_quantized_model(folder, layers, sizes)
        for tier in TIERS:
            found |= measure_tier(tier, folder, sizes, args.quick)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            if tier != "resident":
                over = found["resident_seconds"] / found[f"{tier}_seconds"]
                found[f"{tier}_over_resident_tokens"] = over
                if found["resident_peak_bytes"]:
                    memory = found[f"{tier}_peak_bytes"] / found["resident_peak_bytes"]
                    found[f"{tier}_over_resident_memory"] = memory
                difference = found[f"{tier}_last_loss"] - found["resident_last_loss"]
                found[f"{tier}_loss_difference"] = difference
            write_figures(args.json, found)
    tell(found, args.json)
    unequal = [tier for tier in TIERS if abs(found.get(f"{tier}_loss_difference", 0)) >= 2e-2]
    print(f"not the losses of a resident base: {unequal}" if unequal else "equal losses")
    sys.stdout.flush()
    os._exit(bool(unequal))  # gloo's threads may abort the interpreter as it shuts down


if __name__ == "__main__":
    main()
