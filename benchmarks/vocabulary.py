"""Bytes that a step sends, and its memory, with the vocabulary gathered and split.

    python benchmarks/vocabulary.py

Dry runs of QDoRA (`qfsdp.planning.estimate`), one row of 2,048 tokens per rank and micro-batch:
Llama-3-8B and 70B on 2 and 8 ranks. For each, one micro-batch with sharding.vocabulary gather and
split; then eight micro-batches whose gradients are reduced every time, or once. Prints GiB sent per
rank and step and GiB at the peak, one JSON line each. tests/distributed/test_collectives.py holds
that real ranks send what a dry run counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import load_recipe
from qfsdp.planning.extrapolate import estimate_fast

ROOT = Path(__file__).resolve().parent.parent
MICRO = ["batch_size=1", "max_seq_len=2048", "packed=false", "adapter.rank=16"]
CASES = {
    "gather": ["gradient_accumulation_steps=1", "sharding.vocabulary=gather"],
    "split": ["gradient_accumulation_steps=1", "sharding.vocabulary=split"],
    "split, 8 micro-batches, reduced every time": [
        "gradient_accumulation_steps=8",
        "sharding.vocabulary=split",
        "sharding.reduce_gradients=every_micro_batch",
    ],
    "split, 8 micro-batches, reduced once": [
        "gradient_accumulation_steps=8",
        "sharding.vocabulary=split",
        "sharding.reduce_gradients=every_update",
    ],
}


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    recipe = load_recipe(ROOT / "recipes" / "qdora_distributed.py")
    for config in ("llama3_8b_qdora", "llama3_70b_qdora"):
        for ranks in (2, 8):
            for case, words in CASES.items():
                argv = ["--config", str(ROOT / "configs" / f"{config}.yaml"), *MICRO, *words]
                cfg = load_config(recipe.Config, argv)
                found = estimate_fast(recipe.build_model, recipe.train_step, cfg, ranks)
                sent = {name: round(size / 2**30, 3) for name, size in found.wire.items()}
                total, peak = (round(n / 2**30, 2) for n in (sum(found.wire.values()), found.peak))
                row = {"config": config, "ranks": ranks, "case": case, "sent": sent}
                print(json.dumps(row | {"total": total, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
