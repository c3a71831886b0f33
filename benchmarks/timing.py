"""Shared by the benchmarks: timing in turns, ratios with their spread, a JSON file."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from qfsdp.modules.compute_dtype import has_bf16_products

Cases = Mapping[str, Callable[[], Any]]
Times = dict[str, list[float]]
Figures = dict[str, float]
Clock = Callable[[], float]

SHARED = """On a busy machine set OMP_WAIT_POLICY=PASSIVE; otherwise threads spin for whole time
slices while they wait for each other. Or set OMP_NUM_THREADS=1 for figures of one core."""
LONG_ENOUGH = 0.005  # seconds of calls between two readings of the clock
FLUSH_BYTES = 256 << 20  # more than the second-level cache of any GPU


def base_arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; `--help` prints the module's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, about a minute")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of benchmarks that take turns."""
    parser = base_arguments(doc)
    parser.epilog = SHARED
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument(
        "--repeat", type=int, default=7, help="rounds; figures are medians over them"
    )
    return parser


def usual_dtype(device: str) -> Literal["bf16", "fp32"]:
    """bf16, but fp32 on a CPU without bf16 products: others would compute in bf16 even there."""
    return "bf16" if device != "cpu" or has_bf16_products() else "fp32"


def in_turns(
    cases: Cases, rounds: int, device: str = "cpu", calls: int = 0, clock: Clock = time.perf_counter
) -> Times:
    """Seconds of a call of every case, once per round, so that noise affects all cases equally.

    Each case is called once before, which compiles it and tells how many calls fill
    `LONG_ENOUGH`. Ranks must call a case equally often: then give `calls`. On a GPU a call is
    timed by events, and its operands are not in the cache.
    """
    if device == "cuda":
        return _on_gpu(cases, rounds)
    of_case: dict[str, int] = {}
    for name, case in cases.items():
        case()
        of_case[name] = calls or 1 + int(LONG_ENOUGH / seconds_of(case, 1, clock))
    found: Times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(seconds_of(case, of_case[name], clock))
    return found


def seconds_of(case: Callable[[], Any], calls: int = 1, clock: Clock = time.perf_counter) -> float:
    since = clock()
    for _ in range(calls):
        case()
    return (clock() - since) / calls


def _on_gpu(cases: Cases, rounds: int) -> Times:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for case in cases.values():
        for _ in range(3):
            case()
    marks: dict[str, list[Any]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Longer than launching the case takes, so its kernels run without gaps.
            flush.zero_()
            torch.cuda._sleep(1_000_000)
            start.record()
            case()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [s.elapsed_time(e) / 1e3 for s, e in pairs] for name, pairs in marks.items()}


def spread(key: str, values: Iterable[float]) -> Figures:
    """The median under `key`, and `key_min`, `key_max`."""
    values = list(values)
    return {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}


def ratios(key: str, over: Sequence[float], under: Sequence[float]) -> Figures:
    """`spread` of the ratios of the same rounds."""
    return spread(key, (a / b for a, b in zip(over, under, strict=True)))


def geometric(key: str, parts: Sequence[Figures], name: str) -> Figures:
    """The geometric mean of `name` over several measurements, under `key`; `_min` and `_max` are
    the smallest and the largest of all."""
    found = [part for part in parts if name in part]
    if not found:
        return {}
    return {
        key: statistics.geometric_mean(part[name] for part in found),
        f"{key}_min": min(part[f"{name}_min"] for part in found),
        f"{key}_max": max(part[f"{name}_max"] for part in found),
    }


def table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))
    print(flush=True)


def write_figures(path: Path | None, figures: Mapping[str, float]) -> None:
    """Writes the figures so far to `path`, if there is one: whole, whenever the process ends."""
    if path is not None:
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(figures, indent=2) + "\n")
        unfinished.replace(path)


def tell(figures: Figures, path: Path | None, details: Figures | None = None) -> None:
    """Prints every figure with its spread; writes the figures and `details` to `path`."""
    for key, value in figures.items():
        if not key.endswith(("_min", "_max")):
            ends = [f"{figures[k]:.3g}" for k in (f"{key}_min", f"{key}_max") if k in figures]
            print(f"{key} {value:.4g}" + (f" ({' to '.join(ends)})" if ends else ""))
    write_figures(path, (details or {}) | figures)
