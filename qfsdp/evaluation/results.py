"""The figures of an evaluation: a table for people, JSON for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qfsdp.evaluation.exact_match import ExactMatch
from qfsdp.evaluation.intervals import CONFIDENCE_LEVEL, Interval
from qfsdp.evaluation.perplexity import MeanLoss


@dataclass(frozen=True)
class Result:
    """One figure.

    Fields:
        section, name: the place in the config of what was evaluated; a task of lm-eval is a name.
        metric: what the value is.
        interval: its confidence interval; None where there is none.
        count, unit: over how many "tokens" or "rows".
    """

    section: str
    name: str
    metric: str
    value: float
    interval: Interval | None
    count: int
    unit: str


def loss_results(section: str, name: str, found: MeanLoss) -> list[Result]:
    """The mean loss (nats per token) and the perplexity."""
    low, high = found.interval
    rest = (found.tokens, "tokens")
    perplexities = (math.exp(low), math.exp(high))
    return [
        Result(section, name, "loss", found.loss, found.interval, *rest),
        Result(section, name, "perplexity", found.perplexity, perplexities, *rest),
    ]


def exact_match_results(name: str, found: ExactMatch) -> list[Result]:
    """The share of right answers."""
    score = (found.accuracy, found.interval, found.rows, "rows")
    return [Result("exact_match", name, "exact_match", *score)]


def format_table(results: Sequence[Result]) -> str:
    """One line per figure, in columns."""
    rows = [("", "metric", "value", f"{CONFIDENCE_LEVEL:.0%} interval", "over")]
    for result in results:
        low, high = result.interval or (math.nan, math.nan)
        told = "" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
        what = f"{result.section}.{result.name}"
        rows.append((what, result.metric, f"{result.value:.4f}", told, _count(result)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _count(result: Result) -> str:
    return f"{result.count:,} {result.unit}"


def write_results(path: Path, results: Sequence[Result], about: dict[str, Any]) -> None:
    """A JSON object: `about` and, under "results", a list of the figures. An interval that is not
    known is null."""
    found = [asdict(result) for result in results]
    for entry in found:
        if entry["interval"] is not None and any(map(math.isnan, entry["interval"])):
            entry["interval"] = None
    partial = path.with_name(f"{path.name}.partial")
    report = about | {"level": CONFIDENCE_LEVEL, "results": found}
    partial.write_text(json.dumps(report, indent=2) + "\n")
    os.replace(partial, path)
