"""Shows how far the rows of a dataset are: a bar, or a line every five seconds in a log file."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from qfsdp.common.terminal import is_terminal

EVERY_S = 5.0


class RowProgress:
    """Rows done, rows per second and the time that is left, on stderr.

    Work that takes less than two seconds shows nothing. Only the rank that does the work uses it.
    """

    def __init__(self, text: str, total: int) -> None:
        self._text, self._total, self._done = text, total, 0
        self._began = self._said = time.monotonic()
        self._bar: Any = None
        local = os.environ.get("LOCAL_RANK", "0")
        self._words = text if local == "0" else f"local rank {local}: {text}"

    def __enter__(self) -> RowProgress:
        if is_terminal():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._words, total=self._total, unit=" rows", delay=2, leave=False
            )
        return self

    def advance(self, rows: int) -> None:
        """Counts rows that are done."""
        self._done += rows
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(rows)
        elif now - self._said > EVERY_S:
            self._said = now
            rate = self._done / (now - self._began)
            left = (self._total - self._done) / rate
            print(
                f"{self._words}: {self._done:,} of {self._total:,} rows, {rate:,.0f} rows/s, "
                f"{left:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
