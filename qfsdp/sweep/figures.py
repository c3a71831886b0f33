"""Charts of a sweep: each number against each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from qfsdp.sweep.cells import Cell
from qfsdp.sweep.results import DONE
from qfsdp.sweep.tables import COLUMNS, axes_of
from qfsdp.training.report.charts import COLOURS, Chart, Line, Point, is_geometric, needs_log

MEASURES = (
    *("memory_gib", "samples_per_second", "tokens_per_second"),
    *("usd_per_1000_samples", "usd_per_run"),
)
Row = dict[str, Any]


def charts_of(
    cells: Sequence[Cell], results: dict[str, Row], device_gib: float | None = None
) -> dict[str, Chart]:
    """File name without suffix -> chart, for each number and each axis with several values.

    Lines stand for the values of further axes, those of words first, as long as there are colours;
    other axes keep one value, which the title names: of numbers the middle one, of words the one
    with the most cells that fit. Lines without a result, charts of a single value and cells of
    points are left out.

    Args:
        results: with costs, by the cells' keys.
        device_gib: memory of a GPU, for a line in the charts of memory; None: no line.
    """
    cells = [cell for cell in cells if cell.in_grid and cell.key in results]
    values = {axis: list(dict.fromkeys(_shown(c, axis) for c in cells)) for axis in axes_of(cells)}
    values = {axis: found for axis, found in values.items() if len(found) > 1}
    scores = dict.fromkeys(name for row in results.values() for name in row.get("scores", {}))
    charts = {}
    for axis in values:
        split = _split(values, axis, [c for c in cells if results[c.key]["status"] in DONE])
        for measure in (*MEASURES, *scores):
            limit = device_gib if measure == "memory_gib" else None
            chart = _chart(cells, results, values, axis, measure, limit, *split)
            if len({x for line in chart.lines for x, y in line.points if y is not None}) > 1:
                name = f"{measure}_over_{axis}"
                charts[name.replace("/", "_").replace(" ", "_").replace(".", "_")] = chart
    return charts


def _shown(cell: Cell, axis: str) -> Any:
    value = cell.point[axis]
    return value if isinstance(value, int | float | str) else str(value)


def are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


def _chart(
    cells: Sequence[Cell],
    results: dict[str, Row],
    values: dict[str, list[Any]],
    axis: str,
    measure: str,
    limit: float | None,
    lines_of: Sequence[str],
    fixed: dict[str, Any],
) -> Chart:
    numeric = are_numbers(values[axis])
    xs = sorted(values[axis]) if numeric else values[axis]
    lines = []
    for chosen in product(*(values[name] for name in lines_of)):
        wanted = fixed | dict(zip(lines_of, chosen, strict=True))
        points: list[Point] = []
        for cell in cells:
            if all(_shown(cell, name) == value for name, value in wanted.items()):
                x = _shown(cell, axis)
                points.append((x if numeric else xs.index(x), _value(results[cell.key], measure)))
        if any(y is not None for _, y in points):
            lines.append(Line(", ".join(map(str, chosen)), points, dots=True))
    says = ", ".join(f"{name} {value}" for name, value in fixed.items())
    label, log_x = COLUMNS.get(measure, measure), numeric and is_geometric(xs)
    # A line far above all values would flatten them.
    ys = [y for line in lines for _, y in line.points if y is not None]
    near = limit is not None and bool(ys) and limit < 2 * max(ys)
    return Chart(
        f"{label} over {axis}" + (f" ({says})" if says else ""),
        axis,
        label,
        lines,
        log_x=log_x,
        log_y=needs_log(lines),
        ticks=xs if log_x else () if numeric else range(len(xs)),
        names=() if numeric else [str(x).rpartition("/")[2] for x in xs],
        from_zero=True,
        limit=(limit, "memory of a GPU") if limit is not None and near else None,
    )


def _split(
    values: dict[str, list[Any]], axis: str, fit: Sequence[Cell]
) -> tuple[list[str], dict[str, Any]]:
    """The axes whose values are lines, and one value of each other axis."""
    others = [name for name in values if name != axis]
    others.sort(key=lambda name: are_numbers(values[name]))  # words first
    lines_of: list[str] = []
    for name in others:
        if math.prod(len(values[one]) for one in [*lines_of, name]) <= len(COLOURS):
            lines_of.append(name)
    fixed = {name: values[name][len(values[name]) // 2] for name in others if name not in lines_of}
    for name, middle in fixed.items():
        if not are_numbers(values[name]):
            fitting = [_shown(cell, name) for cell in fit]
            fixed[name] = max([middle, *values[name]], key=fitting.count)  # the middle if equal
    return lines_of, fixed


def _value(row: Row, measure: str) -> float | None:
    score = row.get("scores", {}).get(measure)
    found: float | None = score[0] if score else row.get(measure)
    return found
