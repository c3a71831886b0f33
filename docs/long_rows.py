"""Writes the table of docs/guide/long-rows.md: the longest row that fits, by estimate.

    python docs/long_rows.py           in some minutes

Lengths are powers of two up to 2,097,152 tokens. Memory of rows of several tiles is linear in their
length, so two estimates give all longer ones (`qfsdp.planning.extrapolate`); shorter rows have one
of their own. One row is a micro-batch. tests/docs/test_long_rows.py holds the table current.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide" / "long-rows.md"
TABLE = re.compile(r"(<!-- table of docs/long_rows.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
CONFIG = ROOT / "configs" / "llama3_1_8b_qlora_512k_1x80gb.yaml"  # in tiles, with offload
MODELS = ("Llama-3.1-8B", "Qwen3-32B", "Llama-3.3-70B")
CARDS = ((1, "24 GB", "rtx4090"), (1, "80 GB", "h100"), (8, "80 GB", "h100"))
# By number of ranks: what is added to tiles and `activation.offload`, the faster one first.
HOST, SHARED = "sharding.offload_base=cpu", "sharding.context_parallel=8"
WAYS: dict[int, tuple[tuple[str, ...], ...]] = {1: ((), (HOST,)), 8: ((SHARED,),)}
LENGTHS = [2**n for n in range(12, 22)]
GIB = 2**30

Estimated = Callable[[int], Any]
"""From the length of a row to its `Estimate`."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(with_table())


def with_table() -> str:
    """The text of the page with its table."""
    lines = [("GPUs", *MODELS), ("---",) * (1 + len(MODELS)), *rows()]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return TABLE.sub(lambda match: match[1] + table, PAGE.read_text())


def rows() -> Iterator[tuple[str, ...]]:
    from qfsdp.planning.hardware import known_gpu

    known: dict[tuple[str, int, tuple[str, ...]], Estimated] = {}
    for ranks, name, gpu in CARDS:
        cells = []
        for model in MODELS:
            for way in WAYS[ranks]:
                if (model, ranks, way) not in known:
                    known[model, ranks, way] = by_length(model, ranks, way)
            ways = {way: known[model, ranks, way] for way in WAYS[ranks]}
            cells.append(cell(ways, ranks, known_gpu(gpu).device_memory))
        yield f"{ranks} x {name}", *cells


def by_length(model: str, ranks: int, way: tuple[str, ...]) -> Estimated:
    """The estimates of a way to run."""
    from qfsdp.config.tool_config import read_training
    from qfsdp.planning import extrapolate
    from qfsdp.planning.known_models import planned_config

    longest = 8 * LENGTHS[-1]  # long enough to be estimated from two shorter lengths
    words = [f"model.path={model}", f"model.max_positions={longest}", f"max_seq_len={longest}"]
    words += ["gradient_accumulation_steps=1", *way]
    training = read_training(["--config", str(CONFIG), *words])
    config = planned_config(training.cfg.model)
    short = extrapolate._shorter(training.cfg, config)
    assert short is not None
    functions = training.recipe.build_model, training.recipe.train_step
    one, two = (extrapolate.estimate_fast(*functions, cfg, ranks) for cfg in short)
    lengths, depth = tuple(cfg.max_seq_len for cfg in short), config.num_hidden_layers
    print(model, ranks, *way, flush=True)

    def estimated(length: int) -> Any:
        if length >= lengths[0]:
            return extrapolate._more_rows(one, two, lengths, length, depth)
        return extrapolate.estimate_fast(*functions, replace(short[0], max_seq_len=length), ranks)

    return estimated


def cell(ways: dict[tuple[str, ...], Estimated], ranks: int, memory: int) -> str:
    """The longest row of all ways, in the first way that takes it."""
    from qfsdp.planning.predict import PROCESS_BYTES

    ways = {way: of for way, of in ways.items() if of(LENGTHS[-1]).steady <= memory}
    for length in reversed(LENGTHS):
        for way, estimated in ways.items():
            found = estimated(length)
            if found.reserved <= memory:
                host = ranks * (PROCESS_BYTES + sum(found.host.values())) / GIB
                more = ", base in the host" * (HOST in way)
                return f"{length:,} ({found.reserved / GIB:.1f} GiB, host {host:,.0f} GiB{more})"
    return "none"


if __name__ == "__main__":
    main()
