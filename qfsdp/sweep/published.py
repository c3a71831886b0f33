"""Figures that others have published, beside those of a sweep.

A file has a list of reports:

    - source: https://...
      date: 2024-03-01
      setup: in words, how they measured
      memory: reserved
      figures:
        - point: {method: QLoRA, batch_size: 10}
          memory_gib: 20.97
          samples_per_second: 2.2

Other measures are `seconds_per_run`, and `usd_per_run` as a range: `[2.37, 4.14]`.

`memory` says what their figure counts: "allocated" tensors, what PyTorch's allocator has
"reserved", or all that the "device" shows. `fits: false` stands for a run that ran out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from qfsdp.common.errors import UserError
from qfsdp.common.files import why
from qfsdp.common.messages import first_line, flat
from qfsdp.config.load import get_key
from qfsdp.config.reference import shown
from qfsdp.planning.estimate import FRAGMENTATION
from qfsdp.sweep.cells import Cell
from qfsdp.sweep.results import COLUMNS, Row, Table
from qfsdp.training.report.charts import number

MEASURES = ("memory_gib", "samples_per_second", "seconds_per_run", "usd_per_run")
KINDS = ("allocated", "reserved", "device")
RATIO = "Ours over theirs; our memory is counted as each report counts it."


def read_published(file: Path, cells: Sequence[Cell]) -> list[tuple[dict[str, Any], Any, Cell]]:
    """The reports' figures with the cell of each: (report, figure, cell). Raises UserError: the
    file cannot be read; or a point is that of no cell or of several."""
    try:
        reports = yaml.safe_load(file.read_text(encoding="utf-8"))
        found = []
        for report in reports:
            if report["memory"] not in KINDS or not (report["source"] and report["date"]):
                raise ValueError(f"memory: one of {', '.join(KINDS)}; source and date")
            for figure in report["figures"]:
                matching = [cell for cell in cells if _is_at(cell, figure["point"])]
                if len(matching) != 1:
                    raise ValueError(f"point {figure['point']} is that of {len(matching)} cells")
                found.append((report, figure, matching[0]))
    except OSError as error:
        raise UserError(f"published: '{file}' cannot be read: {why(error)}") from None
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        what = f"published: '{file}' is not valid ({first_line(error)})"
        expected = "reports as `qfsdp/sweep/published.py` describes them"
        raise UserError(f"{what}; expected {expected}") from None
    return found


def _is_at(cell: Cell, point: dict[str, Any]) -> bool:
    """Whether a cell has a point's values: those of its axes, or else of its config."""
    known = cell.changes | cell.own | cell.point
    wanted = flat(point)
    found = {name: known[name] if name in known else get_key(cell.cfg, name) for name in wanted}
    return all(str(found[name]) == str(value) for name, value in wanted.items())


def beside(published: Sequence[tuple[dict[str, Any], Any, Cell]], rows: dict[str, Row]) -> Table:
    """A table of published figures whose cells are finished. A row has our figure, the published
    one, and their ratio if that is one number. Then come the axes with several values, and the
    number of the source if there are several.

    Args:
        rows: results by the cells' keys.
    """
    found: list[tuple[list[str], dict[str, str], str]] = []  # cells of a row, point, source
    for report, figure, cell in published:
        if (row := rows.get(cell.key)) is None:
            continue
        point = {axis: shown(value) for axis, value in cell.point.items()}
        for measure in MEASURES:
            of_memory, theirs = measure == "memory_gib", figure.get(measure)
            if measure in figure or (of_memory and not figure.get("fits", True)):
                ours = our_memory(row, report["memory"]) if of_memory else row.get(measure)
                cells = [COLUMNS[measure], "none" if ours is None else number(ours)]
                both = ours is not None and isinstance(theirs, int | float)
                cells += [_their_words(theirs), f"{ours / theirs:.2f}" if both else ""]
                found.append((cells, point, f"{report['source']} ({report['date']})"))
    sources = list(dict.fromkeys(source for _, _, source in found))
    several = len(sources) > 1
    axes = dict.fromkeys(axis for _, point, _ in found for axis in point)
    told = [axis for axis in axes if len({point.get(axis, "") for _, point, _ in found}) > 1]
    head = ["figure", "ours", "published", "ours / published", *told, *["source"] * several]
    lines = [
        [
            *cells,
            *(point.get(axis, "") for axis in told),
            *[f"[{sources.index(source) + 1}]"] * several,
        ]
        for cells, point, source in found
    ]
    theirs = [f"[{at}] {source}" for at, source in enumerate(sources, 1)] if several else sources
    return Table(
        "Beside published figures", f"{RATIO} Theirs: {', '.join(theirs)}.\n\n", head, lines
    )


def _their_words(theirs: float | list[float] | None) -> str:
    """ "20.97", "2.37 to 4.14" or "out of memory"."""
    if theirs is None:
        return "out of memory"
    return " to ".join(map(number, theirs if isinstance(theirs, list) else [theirs]))


def our_memory(row: dict[str, Any], kind: str) -> float | None:
    """GiB of a result, counted as a report counts."""
    if "allocated_gib" not in row:
        return None
    if kind == "device" or (kind == "reserved" and row["status"] == "measured"):
        return float(row["memory_gib"])
    return float(row["allocated_gib"]) * (1 if kind == "allocated" else 1 + FRAGMENTATION)
