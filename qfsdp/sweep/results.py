"""`cells.jsonl`: a line of JSON per finished cell, whole at any time.

    {"key": "3f2a...", "point": {"batch_size": 4}, "mode": "estimate", "status": "fits", ...}

`status` is "fits" (an estimate), "measured", "does not fit" or "failed"; the last two have a
`reason` in one line. Numbers that a cell does not have are left out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qfsdp.common.files import to_json, write_text, writing
from qfsdp.sweep.cells import Cell
from qfsdp.training.report.run_folder import read_lines

FILE = "cells.jsonl"
FITS, MEASURED, TOO_LARGE, FAILED = "fits", "measured", "does not fit", "failed"
DONE = (FITS, MEASURED)
Row = dict[str, Any]
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


class Table(NamedTuple):
    """A table of a sweep; `note` stands below its title."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]


def ranked(cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Cell]:
    """The cells by their validation loss, the lowest first; those without one keep their order."""
    losses = {key: row.get("validation_loss", math.inf) for key, row in rows.items()}
    return sorted(cells, key=lambda cell: losses.get(cell.key, math.inf))


def best_of(cells: Sequence[Cell], rows: Mapping[str, Row], folder: Path) -> str | None:
    """A line about the cell with the lowest validation loss; None if no cell has one."""
    cell = next(iter(ranked(cells, rows)), None)
    row = {} if cell is None else rows.get(cell.key, {})
    if cell is None or "validation_loss" not in row:
        return None
    loss = f"validation loss {row['validation_loss']:.4g} at step {row['best_step']}"
    return f"best: {cell.name}: {loss}; {folder / 'cells' / cell.key}"


class Results:
    """The finished cells of a sweep, in its folder. Threads may share one.

    Args:
        folder: made if need be.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / FILE, threading.Lock()
        with writing("output_dir", folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._rows = {row["key"]: row for row in read_lines(self._path) if "key" in row}

    def get(self, key: str) -> Row | None:
        """The result of a cell; None if it is not finished."""
        return self._rows.get(key)

    def done(self, cells: Sequence[Cell]) -> str:
        """A few words: how many of `cells` are done, and how many other cells the file has. Those
        belong to another config, or to a version with other keys."""
        done = sum(cell.key in self._rows for cell in cells)
        others = len(self._rows) - done
        stay = f"; {FILE} has {others} of another config or version" if others else ""
        return f"{done} of them done{stay}"

    def add(self, row: Row) -> None:
        """Adds a cell, and writes the file again under its final name once it is complete. Raises
        UserError: it cannot be written."""
        with self._lock:
            self._rows[row["key"]] = row
            text = "".join(to_json(row, default=str) + "\n" for row in self._rows.values())
            with writing("output_dir", self._path):
                write_text(self._path, text)
