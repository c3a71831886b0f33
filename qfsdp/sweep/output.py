"""Writes a sweep's table, figures and page from its results.

table.md        every cell; published figures beside ours; the prices
figures/*.png   each number against each axis
report.html     all of it in one page
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from qfsdp.common.files import write_text, writing
from qfsdp.config.reference import shown
from qfsdp.sweep.cells import Cell
from qfsdp.sweep.prices import Price, costs
from qfsdp.sweep.results import COLUMNS, DONE, FILE, Row, Table, ranked
from qfsdp.training.report.charts import (
    COLOURS,
    Chart,
    Line,
    Point,
    is_geometric,
    needs_log,
    number,
)
from qfsdp.training.report.drawing import write_picture
from qfsdp.training.report.page import Section, charts_section, part, table, write_page
from qfsdp.training.report.run_folder import read_lines
from qfsdp.training.report.sections import shortened

TABLE, PAGE, FIGURES = "table.md", "report.html", "figures"


def write_output(
    folder: Path,
    mode: str,
    cells: Sequence[Cell],
    results: dict[str, Row],
    compared: Table,
    prices: dict[str, Price],
    device_gib: float | None,
) -> list[Path]:
    """Writes all files; returns the table and the page.

    Args:
        mode: of the sweep, for the title, which names the models of the cells.
        results: with costs, by the cells' keys.
        compared: figures of others beside ours.
        prices: those that the costs come from.
        device_gib: memory of a GPU, for the charts; None: not known, or not one.

    Raises:
        UserError: a file cannot be written.
    """
    models = dict.fromkeys(Path(cell.cfg.model.path).name for cell in cells if cell.cfg)
    title = f"{folder.resolve().name}: {', '.join(models)} by {mode}"
    charts = charts_of(cells, results, device_gib)
    tables = [compared, *tables_of(ranked(cells, results), results), price_table(prices)]
    tables = [table for table in tables if table.rows]
    parts = [f"## {one.title}\n\n{one.note}{markdown(one.head, one.rows)}" for one in tables]
    sections = [charts_section("Figures", list(charts.values())), *map(_section, tables)]
    with writing("output_dir", folder):
        write_text(folder / TABLE, "\n".join([f"# {title}\n", *parts]))
        for name, chart in charts.items():
            write_picture(chart, folder / FIGURES / f"{name}.png")
        done = f"{len(results)} cells of {len(cells)}"
        kept = [section for section in sections if section.body]
        write_page(folder / PAGE, title, f"{done}; {folder}", kept)
    return [folder / TABLE, folder / PAGE]


def tables_of(cells: Sequence[Cell], results: dict[str, Row]) -> list[Table]:
    """The finished cells: points, then the grid."""
    points, grid = ([c for c in cells if c.in_grid == of_grid] for of_grid in (False, True))
    named = (("Points", points), ("Grid", grid))
    return [Table(title, "", *rows_of_table(some, results)) for title, some in named]


def price_table(prices: dict[str, Price]) -> Table:
    lines = [[name, f"{p.usd_per_hour:.2f}", p.date, p.source] for name, p in prices.items()]
    return Table("Prices", "", ["GPU", "US$ per hour", "read on", "source"], sorted(lines))


def finished_sections(folder: Path, prices: dict[str, Price]) -> list[Section]:
    """The sections of a sweep that lies in a folder, finished or not, for a page of several runs.

    Costs of whole runs are left out where only the sweep's config says how long a run is.
    """
    cells, results = [], {}
    for row in read_lines(folder / FILE):
        if {"key", "point", "status", "ranks"} <= row.keys():
            cell = Cell(row["point"], {}, {}, None, [], row["key"], row.get("in_grid", True))
            cells.append(cell)
            price = prices.get(str(row.get("gpu")))
            results[cell.key] = row | costs(row, price, None)
    name = folder.resolve().name
    sections = [charts_section(f"Sweep {name}", list(charts_of(cells, results).values()))]
    for one in tables_of(cells, results):
        sections.append(_section(one._replace(title=f"Sweep {name}: {one.title}")))
    return [section for section in sections if section.body]


def _section(one: Table) -> Section:
    note = part("note", one.note) if one.note else ""
    return Section(one.title, note + table(one.head, one.rows))


# ---- tables --------------------------------------------------------------------------------------

MOST_REASON = 90  # characters in a table; cells.jsonl has all


def rows_of_table(
    cells: Sequence[Cell], results: dict[str, dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the point, the columns that any cell has a number for, scores, the outcome.

    Args:
        results: with costs, by the cells' keys; cells without one are left out.
    """
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell.point))
    found = [results[cell.key] for cell in cells if cell.key in results]
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in found)]
    scores = list(dict.fromkeys(name for row in found for name in row.get("scores", {})))
    head = [*axes, *(COLUMNS[name] for name in columns), *scores, "outcome"]
    rows = []
    for cell in cells:
        if (row := results.get(cell.key)) is None:
            continue
        cells_of_row = [shown(cell.point[axis]) if axis in cell.point else "" for axis in axes]
        numbers = (row.get(name) for name in columns)  # null: not finite
        cells_of_row += ["" if value is None else number(value) for value in numbers]
        cells_of_row += [score_words(row.get("scores", {}).get(name)) for name in scores]
        status = row["status"]
        if status not in DONE:
            status += f": {shortened(row.get('reason', ''), MOST_REASON)}"
        rows.append([*cells_of_row, status])
    return head, rows


def score_words(score: Sequence[float | None] | None) -> str:
    """ "0.41 (0.32 to 0.51)"."""
    value, low, high = score or (None, None, None)
    if value is None:
        return ""
    both = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
    return number(value) + both


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


# ---- charts: each number against each axis -------------------------------------------------------

MEASURES = (
    *("memory_gib", "samples_per_second", "tokens_per_second"),
    *("usd_per_1000_samples", "usd_per_run"),
)


def charts_of(
    cells: Sequence[Cell], results: dict[str, Row], device_gib: float | None = None
) -> dict[str, Chart]:
    """File name without suffix -> chart, for each number and each axis with several values.

    A line stands for values of further axes, of words before numbers, as long as there are colours.
    Each axis that is left keeps one value, which the title names: the middle one of numbers, or the
    word with the most cells that fit. Lines without a result, charts of a single value and cells of
    points are left out.

    Args:
        results: with costs, by the cells' keys.
        device_gib: memory of a GPU, for a line in the charts of memory; None: no line.
    """
    of_grid = [
        ({axis: _drawn(value) for axis, value in cell.point.items()}, results[cell.key])
        for cell in cells
        if cell.in_grid and cell.key in results
    ]
    values: dict[str, list[Any]] = {}
    for point, _ in of_grid:
        for axis, value in point.items():
            values[axis] = [*dict.fromkeys([*values.get(axis, []), value])]
    values = {axis: found for axis, found in values.items() if len(found) > 1}
    scores = dict.fromkeys(name for row in results.values() for name in row.get("scores", {}))
    charts = {}
    for axis in values:
        fitting = [point for point, row in of_grid if row["status"] in DONE]
        lines_of, fixed = _split(values, axis, fitting)
        own = [(point, row) for point, row in of_grid if fixed.items() <= point.items()]
        for measure in (*MEASURES, *scores):
            lines = _lines(own, values, axis, measure, lines_of)
            if len({x for line in lines for x, y in line.points if y is not None}) > 1:
                limit = device_gib if measure == "memory_gib" else None
                name = f"{measure}_over_{axis}"
                name = name.replace("/", "_").replace(" ", "_").replace(".", "_")
                charts[name] = _chart(lines, values[axis], axis, measure, limit, fixed)
    return charts


def _drawn(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


def _lines(
    found: Sequence[tuple[dict[str, Any], Row]],
    values: dict[str, list[Any]],
    axis: str,
    measure: str,
    lines_of: Sequence[str],
) -> list[Line]:
    """A line for each combination of values of the axes `lines_of`, of points and their results."""
    xs, lines = values[axis], []
    for chosen in product(*(values[name] for name in lines_of)):
        wanted = dict(zip(lines_of, chosen, strict=True))
        points: list[Point] = [
            (
                point[axis] if are_numbers(xs) else xs.index(point[axis]),
                row.get("scores", {}).get(measure, [row.get(measure)])[0],
            )
            for point, row in found
            if axis in point and wanted.items() <= point.items()
        ]
        if any(y is not None for _, y in points):
            lines.append(Line(", ".join(map(str, chosen)), points, dots=True))
    return lines


def _chart(
    lines: Sequence[Line],
    values: Sequence[Any],
    axis: str,
    measure: str,
    limit: float | None,
    fixed: dict[str, Any],
) -> Chart:
    numeric = are_numbers(values)
    xs = sorted(values) if numeric else values
    says = ", ".join(f"{name} {value}" for name, value in fixed.items())
    label, log_x = COLUMNS.get(measure, measure), numeric and is_geometric(xs)
    # A line far above all values would flatten them.
    highest = max(y for line in lines for _, y in line.points if y is not None)
    near = limit is not None and limit < 2 * highest
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
    values: dict[str, list[Any]], axis: str, fitting: Sequence[dict[str, Any]]
) -> tuple[list[str], dict[str, Any]]:
    """How a chart over one axis shows the others: as lines, or fixed to one value.

    Args:
        fitting: points of the cells that fit.

    Returns:
        The axes with a line for each value; and the value of each axis that is fixed.
    """
    others = [name for name in values if name != axis]
    others.sort(key=lambda name: are_numbers(values[name]))  # words first
    lines_of: list[str] = []
    for name in others:
        if math.prod(len(values[one]) for one in [*lines_of, name]) <= len(COLOURS):
            lines_of.append(name)
    fixed = {name: values[name][len(values[name]) // 2] for name in others if name not in lines_of}
    for name, middle in fixed.items():
        if not are_numbers(values[name]):
            fits = [point.get(name) for point in fitting]
            fixed[name] = max([middle, *values[name]], key=fits.count)  # the middle if equal
    return lines_of, fixed
