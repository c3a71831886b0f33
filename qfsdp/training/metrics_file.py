"""`metrics.jsonl`: one line of strict JSON per logged step, whatever happens to disk or process."""

from __future__ import annotations

import json
import os
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from qfsdp.common.files import to_json, whole_file, why, writing
from qfsdp.common.terminal import warn

KEPT_LINES = 10_000  # lines of about 1 KB that wait for space
BATCH_LINES = 100  # written at once; on a full disk every step tries again to write the first


class MetricsFile:
    """Appends lines of JSON to a file.

    A line that cannot be written (a full disk) is kept, and written before the next one as soon as
    there is space again. So the file has no cut line, and a gap only after `KEPT_LINES` lines
    without space, or if the run ends without. It is opened for every line: a file that somebody
    moved away begins anew.

    Args:
        first_step: of a resumed run. Lines of later steps are removed, as these steps run again,
            and so is every line that is no metrics of a step.

    Raises:
        UserError: the file cannot be read, or not be written without these lines.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._waiting: deque[str] = deque()
        self._lost = 0
        self._failed = False  # the last write
        with writing("output_dir", path):
            _drop_after(first_step, path)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a step, with null for NaN and infinity."""
        if len(self._waiting) == KEPT_LINES:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(to_json({"step": step, **metrics}) + "\n")
        self._write()

    def close(self) -> None:
        """Says how many lines the file lacks, if any."""
        if self._waiting:
            self._write()
        if missing := len(self._waiting) + self._lost:
            warn(f"'{self._path}' lacks {missing} lines, which could not be written")

    def _write(self) -> None:
        """Appends the waiting lines, until one cannot be written."""
        try:
            while self._waiting:
                batch = list(islice(self._waiting, BATCH_LINES))
                _append(self._path, "".join(batch).encode())
                for _ in batch:
                    self._waiting.popleft()
        except OSError as error:
            if not self._failed:
                warn(
                    f"'{self._path}' cannot be written: {why(error)}; training goes on, and "
                    f"up to {KEPT_LINES} lines wait until it can be written again"
                )
            self._failed = True
            return
        if self._failed:
            warn(f"'{self._path}' is written again; {self._lost or 'no'} lines are lost")
        self._failed = False


def _append(path: Path, data: bytes) -> None:
    """Writes all of `data`, or leaves the file as it was: a full disk takes a part of a line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _drop_after(step: int, file: Path) -> None:
    """Keeps the lines up to `step`; other lines, damaged ones too, are removed."""
    if not file.exists():
        return
    found = file.read_bytes()
    kept = b"".join(line + b"\n" for line in found.splitlines() if _is_metrics(line, step))
    if kept != found:
        with whole_file(file) as partial:
            partial.write_bytes(kept)


def _is_metrics(line: bytes, last_step: int) -> bool:
    """Whether it is a line of metrics of a step up to `last_step`."""
    try:
        written: Any = json.loads(line)
        return bool(written["step"] <= last_step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
