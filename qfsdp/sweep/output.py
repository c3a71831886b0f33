"""Writes a sweep's table, figures and page from its results.

table.md        every cell; published figures beside ours; the prices
figures/*.png   each number against each axis
report.html     all of it in one page
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qfsdp.common.files import write_text, writing
from qfsdp.sweep.cells import Cell
from qfsdp.sweep.figures import charts_of
from qfsdp.sweep.prices import Price, costs
from qfsdp.sweep.published import Comparison
from qfsdp.sweep.results import FILE, Row, ranked
from qfsdp.sweep.tables import markdown, rows_of_comparison, rows_of_table
from qfsdp.training.report.drawing import write_png
from qfsdp.training.report.page import Section, charts_section, part, table, write_page
from qfsdp.training.report.run_folder import read_lines

TABLE, PAGE, FIGURES = "table.md", "report.html", "figures"
RATIO = "Ours over theirs; our memory is counted as each report counts it."


def write_output(
    folder: Path,
    title: str,
    cells: Sequence[Cell],
    results: dict[str, Row],
    compared: Sequence[Comparison],
    prices: dict[str, Price],
    device_gib: float | None,
) -> list[Path]:
    """Writes all files; returns the table and the page.

    Args:
        results: with costs, by the cells' keys.
        prices: those that the costs come from.
        device_gib: memory of a GPU, for the charts; None: not known, or not one.

    Raises:
        UserError: a file cannot be written.
    """
    charts = charts_of(cells, results, device_gib)
    tables = tables_of(ranked(cells, results), results, compared, prices)
    parts = [f"## {name}\n\n{note}{markdown(head, rows)}" for name, note, head, rows in tables]
    sections = [charts_section("Figures", list(charts.values()))]
    sections += [_table_section(*content) for content in tables]
    with writing("output_dir", folder):
        write_text(folder / TABLE, "\n".join([f"# {title}\n", *parts]))
        for name, chart in charts.items():
            write_png(chart, folder / FIGURES / f"{name}.png")
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
        found.append(("Beside published figures", f"{RATIO}\n\n", *rows_of_comparison(compared)))
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
