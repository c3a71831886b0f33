"""Charts of a sweep: each number against each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    fit = [cell for cell in cells if results[cell.key]["status"] in DONE]
    scores = dict.fromkeys(name for row in results.values() for name in row.get("scores", {}))
    charts = {}
    for axis, measure in product(values, (*MEASURES, *scores)):
        limit = (device_gib, "memory of a GPU") if measure == "memory_gib" and device_gib else None
        chart = _chart(cells, fit, results, values, axis, measure, limit)
        if len({x for line in chart.lines for x, y in line.points if y is not None}) > 1:
            name = f"{measure}_over_{axis}".replace("/", "_").replace(" ", "_").replace(".", "_")
            charts[name] = chart
    return charts


def _shown(cell: Cell, axis: str) -> Any:
    value = cell.point[axis]
    return value if isinstance(value, int | float | str) else str(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _chart(
    cells: Sequence[Cell],
    fit: Sequence[Cell],
    results: dict[str, Row],
    values: dict[str, list[Any]],
    axis: str,
    measure: str,
    limit: tuple[float, str] | None,
) -> Chart:
    lines_of, fixed = _split(values, axis, fit)
    xs = values[axis]
    numeric = all(map(is_number, xs))
    xs = sorted(xs) if numeric else xs
    lines = []
    for chosen in product(*(values[name] for name in lines_of)):
        wanted = fixed | dict(zip(lines_of, chosen, strict=True))
        points = list(_points(cells, results, axis, xs, wanted, measure, numeric))
        if any(y is not None for _, y in points):
            lines.append(Line(", ".join(map(str, chosen)), points, dots=True))
    says = ", ".join(f"{name} {value}" for name, value in fixed.items())
    label = COLUMNS.get(measure, measure)
    log_x = numeric and is_geometric(xs)
    return Chart(
        f"{label} over {axis}" + (f" ({says})" if says else ""),
        axis,
        label,
        lines,
        log_x=log_x,
        log_y=needs_log(lines),
        ticks=(xs if numeric else range(len(xs))) if log_x or not numeric else (),
        names=() if numeric else [str(x).rpartition("/")[2] for x in xs],
        from_zero=True,
        limit=limit if limit and _is_near(limit[0], lines) else None,
    )


def _is_near(limit: float, lines: Sequence[Line]) -> bool:
    """Whether a limit is in the range of the values; a line far above them would flatten them."""
    ys = [y for line in lines for _, y in line.points if y is not None]
    return bool(ys) and limit < 2 * max(ys)


def _split(
    values: dict[str, list[Any]], axis: str, fit: Sequence[Cell]
) -> tuple[list[str], dict[str, Any]]:
    """The axes whose values are lines, and one value of each other axis."""
    others = [name for name in values if name != axis]
    others.sort(key=lambda name: all(map(is_number, values[name])))  # words first
    lines_of: list[str] = []
    for name in others:
        if math.prod(len(values[one]) for one in [*lines_of, name]) <= len(COLOURS):
            lines_of.append(name)
    fixed = {name: values[name][len(values[name]) // 2] for name in others if name not in lines_of}
    for name, middle in fixed.items():
        if not all(map(is_number, values[name])):
            fitting = [_shown(cell, name) for cell in fit]
            fixed[name] = max([middle, *values[name]], key=fitting.count)  # the middle if equal
    return lines_of, fixed


def _points(
    cells: Sequence[Cell],
    results: dict[str, Row],
    axis: str,
    xs: Sequence[Any],
    wanted: dict[str, Any],
    measure: str,
    numeric: bool,
) -> Iterator[Point]:
    for cell in cells:
        if all(_shown(cell, name) == value for name, value in wanted.items()):
            x = _shown(cell, axis)
            yield (x if numeric else xs.index(x)), _value(results[cell.key], measure)


def _value(row: Row, measure: str) -> float | None:
    score = row.get("scores", {}).get(measure)
    found: float | None = score[0] if score else row.get(measure)
    return found
