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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qfsdp.common.errors import UserError
from qfsdp.common.files import why
from qfsdp.common.messages import first_line
from qfsdp.config.load import get_key
from qfsdp.planning.estimate import FRAGMENTATION
from qfsdp.sweep.cells import Cell, flattened

MEASURES = ("memory_gib", "samples_per_second", "seconds_per_run", "usd_per_run")
KINDS = ("allocated", "reserved", "device")


@dataclass(frozen=True)
class Comparison:
    """One figure: ours, theirs (a number or a range), and ours over theirs; None where one does not
    fit.

    Fields:
        point: of the cell.
        measure: of MEASURES.
        source, date: of the report.
    """

    point: dict[str, Any]
    measure: str
    ours: float | None
    theirs: float | list[float] | None
    source: str
    date: str

    @property
    def ratio(self) -> float | None:
        """None where theirs is a range."""
        if self.ours is None or not isinstance(self.theirs, int | float):
            return None
        return self.ours / self.theirs


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
    wanted = flattened(point)
    found = {name: known[name] if name in known else get_key(cell.cfg, name) for name in wanted}
    return all(str(found[name]) == str(value) for name, value in wanted.items())


def compare(
    published: Sequence[tuple[dict[str, Any], Any, Cell]], rows: dict[str, dict[str, Any]]
) -> list[Comparison]:
    """Every published figure beside the result of its cell, if the cell is finished.

    Args:
        rows: results by the cells' keys.
    """
    found = []
    for report, figure, cell in published:
        if (row := rows.get(cell.key)) is None:
            continue
        about = (str(report["source"]), str(report["date"]))
        for measure in MEASURES:
            of_memory = measure == "memory_gib"
            if measure in figure or (of_memory and not figure.get("fits", True)):
                ours = our_memory(row, report["memory"]) if of_memory else row.get(measure)
                found.append(Comparison(cell.point, measure, ours, figure.get(measure), *about))
    return found


def our_memory(row: dict[str, Any], kind: str) -> float | None:
    """GiB of a result, counted as a report counts."""
    if "allocated_gib" not in row:
        return None
    if kind == "device" or (kind == "reserved" and row["status"] == "measured"):
        return float(row["memory_gib"])
    return float(row["allocated_gib"]) * (1 if kind == "allocated" else 1 + FRAGMENTATION)
