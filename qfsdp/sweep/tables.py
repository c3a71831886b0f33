"""Tables of a sweep: every cell, and published figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qfsdp.sweep.cells import Cell
from qfsdp.sweep.published import Comparison
from qfsdp.sweep.results import DONE
from qfsdp.training.report.charts import number

# Name of a number in results -> its column.
COLUMNS = {
    "memory_gib": "GiB per GPU",
    "host_gib": "GiB of the host",
    "seconds_per_step": "s/step",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "seconds_per_run": "s per run",
    "usd_per_1000_samples": "US$ per 1,000 samples",
    "usd_per_run": "US$ per run",
    "loss": "loss",
    "validation_loss": "validation loss",
    "best_step": "at step",
}
MOST_REASON = 90  # characters in a table; cells.jsonl has all


def axes_of(cells: Sequence[Cell]) -> list[str]:
    """The axes of all cells, in their order."""
    return list(dict.fromkeys(axis for cell in cells for axis in cell.point))


def rows_of_table(
    cells: Sequence[Cell], results: dict[str, dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the point, the columns that any cell has a number for, scores, the outcome.

    Args:
        results: with costs, by the cells' keys; cells without one are left out.
    """
    axes, found = axes_of(cells), [results[cell.key] for cell in cells if cell.key in results]
    columns = [name for name in COLUMNS if any(name in row for row in found)]
    scores = list(dict.fromkeys(name for row in found for name in row.get("scores", {})))
    head = [*axes, *(COLUMNS[name] for name in columns), *scores, "outcome"]
    rows = []
    for cell in cells:
        if (row := results.get(cell.key)) is None:
            continue
        cells_of_row = [str(cell.point.get(axis, "")) for axis in axes]
        cells_of_row += [number(row[name]) if name in row else "" for name in columns]
        cells_of_row += [score_words(row.get("scores", {}).get(name)) for name in scores]
        reason = "" if row["status"] in DONE else f": {shorter(row.get('reason', ''))}"
        rows.append([*cells_of_row, row["status"] + reason])
    return head, rows


def score_words(score: Sequence[float | None] | None) -> str:
    """ "0.41 (0.32 to 0.51)"."""
    value, low, high = score or (None, None, None)
    if value is None:
        return ""
    both = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
    return number(value) + both


def shorter(text: str) -> str:
    return text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]} ..."


def rows_of_comparison(found: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: ours, published, the ratio, the point, and where it was published."""
    points = [{axis: str(value) for axis, value in one.point.items()} for one in found]
    axes = dict.fromkeys(axis for point in points for axis in point)
    told = [axis for axis in axes if len({point.get(axis, "") for point in points}) > 1]
    head = ["figure", "ours", "published", "ours / published", *told, "source"]
    rows = [
        [
            COLUMNS[one.measure],
            "none" if one.ours is None else number(one.ours),
            _their_words(one.theirs),
            "" if one.ratio is None else f"{one.ratio:.2f}",
            *(point.get(axis, "") for axis in told),
            f"{one.source} ({one.date})",
        ]
        for one, point in zip(found, points, strict=True)
    ]
    return head, rows


def _their_words(theirs: float | list[float] | None) -> str:
    """ "20.97", "2.37 to 4.14" or "out of memory"."""
    if theirs is None:
        return "out of memory"
    return " to ".join(map(number, theirs if isinstance(theirs, list) else [theirs]))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
