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
from qfsdp.sweep.published import Comparison
from qfsdp.sweep.results import DONE, FILE, Row, ranked
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
RATIO = "Ours over theirs; our memory is counted as each report counts it."


def write_output(
    folder: Path,
    mode: str,
    cells: Sequence[Cell],
    results: dict[str, Row],
    compared: Sequence[Comparison],
    prices: dict[str, Price],
    device_gib: float | None,
) -> list[Path]:
    """Writes all files; returns the table and the page.

    Args:
        mode: of the sweep, for the title, which names the models of the cells.
        results: with costs, by the cells' keys.
        prices: those that the costs come from.
        device_gib: memory of a GPU, for the charts; None: not known, or not one.

    Raises:
        UserError: a file cannot be written.
    """
    models = dict.fromkeys(Path(cell.cfg.model.path).name for cell in cells if cell.cfg)
    title = f"{folder.resolve().name}: {', '.join(models)} by {mode}"
    charts = charts_of(cells, results, device_gib)
    tables = tables_of(ranked(cells, results), results, compared, prices)
    parts = [f"## {name}\n\n{note}{markdown(head, rows)}" for name, note, head, rows in tables]
    sections = [charts_section("Figures", list(charts.values()))]
    sections += [_table_section(*content) for content in tables]
    with writing("output_dir", folder):
        write_text(folder / TABLE, "\n".join([f"# {title}\n", *parts]))
        for name, chart in charts.items():
            write_picture(chart, folder / FIGURES / f"{name}.png")
        done = f"{len(results)} cells of {len(cells)}"
        kept = [section for section in sections if section.body]
        write_page(folder / PAGE, title, f"{done}; {folder}", kept)
    return [folder / TABLE, folder / PAGE]


Content = tuple[str, str, list[str], list[list[str]]]  # title, note, head and rows of a table


def tables_of(
    cells: Sequence[Cell],
    results: dict[str, Row],
    compared: Sequence[Comparison],
    prices: dict[str, Price],
) -> list[Content]:
    """The tables: figures of others first, then all cells, then prices."""
    found: list[Content] = []
    if compared:
        sources = list(dict.fromkeys(map(source_of, compared)))
        told = [f"[{at}] {source}" for at, source in enumerate(sources, 1)]
        theirs = ", ".join(told if len(sources) > 1 else sources)
        rows_beside = rows_of_comparison(compared, sources)
        found.append(("Beside published figures", f"{RATIO} Theirs: {theirs}.\n\n", *rows_beside))
    of_grid = [cell for cell in cells if cell.in_grid]
    of_points = [cell for cell in cells if not cell.in_grid]
    for name, some in (("Points", of_points), ("Grid", of_grid)):
        if any(cell.key in results for cell in some):
            found.append((name, "", *rows_of_table(some, results)))
    if prices:
        lines = [
            [name, f"{p.usd_per_hour:.2f}", p.date, p.source] for name, p in sorted(prices.items())
        ]
        found.append(("Prices", "", ["GPU", "US$ per hour", "read on", "source"], lines))
    return found


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
    for title, note, head, rows in tables_of(cells, results, [], {}):
        sections.append(_table_section(f"Sweep {name}: {title}", note, head, rows))
    return [section for section in sections if section.body]


def _table_section(title: str, note: str, head: list[str], rows: list[list[str]]) -> Section:
    return Section(title, (part("note", note) if note else "") + table(head, rows))


# ---- tables --------------------------------------------------------------------------------------

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
        cells_of_row = [shown(cell.point[axis]) if axis in cell.point else "" for axis in axes]
        cells_of_row += [number(row[name]) if name in row else "" for name in columns]
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


def source_of(one: Comparison) -> str:
    return f"{one.source} ({one.date})"


def rows_of_comparison(
    found: Sequence[Comparison], sources: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows: ours, published, the ratio, the point, and which of several `sources`."""
    points = [{axis: shown(value) for axis, value in one.point.items()} for one in found]
    several = len(sources) > 1
    axes = dict.fromkeys(axis for point in points for axis in point)
    told = [axis for axis in axes if len({point.get(axis, "") for point in points}) > 1]
    head = ["figure", "ours", "published", "ours / published", *told]
    head += ["source"] if several else []
    rows = [
        [
            COLUMNS[one.measure],
            "none" if one.ours is None else number(one.ours),
            _their_words(one.theirs),
            "" if one.ratio is None else f"{one.ratio:.2f}",
            *(point.get(axis, "") for axis in told),
            *([f"[{sources.index(source_of(one)) + 1}]"] if several else []),
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
