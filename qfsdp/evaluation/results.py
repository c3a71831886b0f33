"""Results of an evaluation as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qfsdp.common.files import write_json, writing
from qfsdp.evaluation.exact_match import ExactMatch
from qfsdp.evaluation.heldout_loss import perplexity
from qfsdp.evaluation.intervals import CONFIDENCE_LEVEL, Interval
from qfsdp.evaluation.perplexity import MeanLoss


@dataclass(frozen=True)
class Result:
    """The value of one metric.

    Fields:
        section, name: place in the config of the evaluated dataset; for lm-eval `name` is the task.
        metric: name of the metric.
        interval: confidence interval of the value, or None.
        count, unit: number of "tokens" or "rows" that the value was measured on.
    """

    section: str
    name: str
    metric: str
    value: float
    interval: Interval | None
    count: int
    unit: str


def loss_results(section: str, name: str, found: MeanLoss) -> list[Result]:
    """The mean loss (nats per token) and the perplexity, as two results."""
    rest = (found.tokens, "tokens")
    low, high = map(perplexity, found.interval)
    return [
        Result(section, name, "loss", found.loss, found.interval, *rest),
        Result(section, name, "perplexity", found.perplexity, (low, high), *rest),
    ]


def exact_match_results(name: str, found: ExactMatch) -> list[Result]:
    """The share of correct answers, as one result."""
    score = (found.accuracy, found.interval, found.rows, "rows")
    return [Result("exact_match", name, "exact_match", *score)]


def format_table(results: Sequence[Result]) -> str:
    """A table with one line per result."""
    rows = [("", "metric", "value", f"{CONFIDENCE_LEVEL:.0%} interval", "over")]
    for result in results:
        low, high = result.interval or (math.nan, math.nan)
        interval = "" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
        name = f"{result.section}.{result.name}"
        over = f"{result.count:,} {result.unit}"
        rows.append((name, result.metric, f"{result.value:.4f}", interval, over))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def write_results(path: Path, results: Sequence[Result], about: dict[str, Any]) -> None:
    """Writes a JSON object: the keys of `about`, "level" and "results", a list of the results.

    An unknown interval and a value that is not finite are null. Raises UserError: the file cannot
    be written."""
    found = [asdict(result) for result in results]
    for entry in found:
        if not all(map(math.isfinite, entry["interval"] or ())):
            entry["interval"] = None
    with writing("output", path):
        write_json(path, about | {"level": CONFIDENCE_LEVEL, "results": found})
