"""A run outlives a full disk that holds its own output, as `qfsdp run ... > log.txt` writes it.

What training prints, `metrics.jsonl` has too. What other commands print is their result: they end
with an error if some of it is lost.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from qfsdp.cli.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
MISSING = b"warning: lines are missing here: the disk was full\n"


class _Output(io.RawIOBase):
    """Writes to a file descriptor, and drops what a full disk does not take.

    Once it takes something again, a line says that others are missing. `is_whole` says whether
    nothing was ever dropped.
    """

    def __init__(self, number: int) -> None:
        self._number, self._lost, self.is_whole = number, False, True

    def write(self, data: object) -> int:
        content = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._lost:
                os.write(self._number, MISSING)
            written = os.write(self._number, content)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._lost, self.is_whole, written = True, False, len(content)
        else:
            self._lost = False
        return written

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)


def outlive_full_disk() -> None:
    """Replaces Python's own standard output and error by streams that do."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # None: it was closed at the start. Others are those of a program that calls us.
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            with suppress(OSError, ValueError):
                setattr(sys, name, _replaced(stream))


def check_output() -> None:
    """Raises UserError if a full disk has not taken all of standard output."""
    stream = getattr(sys.stdout, "stream", sys.stdout)  # below a progress bar
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(raw, _Output):
        stream.flush()
        if not raw.is_whole:
            raise UserError("standard output: a part is lost: no space left on device")


def _replaced(stream: TextIO) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.isatty() or stream is sys.__stderr__,
    )
