"""A run outlives its own output: a full disk, a closed pipe (`| head`), a terminal that is gone.

What a full disk does not take is dropped until it takes something again; training's figures are in
`metrics.jsonl` too. Any other error is final: from there on the stream goes to `output.txt` in the
folder of a training run, and nowhere for other commands. What those print is their result, so they
end with an error if some of it is lost.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
MISSING = b"warning: lines are missing here: the disk was full\n"
FILE = "output.txt"

_folder: Path | None = None  # of the training run


class _Output(io.RawIOBase):
    """Writes to a file descriptor, and goes on when that fails.

    Args:
        number: the descriptor.
        name: of the stream, for the first line of `FILE`.
        gone: why nobody reads it from the start; "" if somebody may.

    Fields:
        lost: why a part of the output is lost; "" if nothing is.
    """

    def __init__(self, number: int, name: str = "standard output", gone: str = "") -> None:
        self._number, self._name, self._gone = number, name, gone
        self._is_full, self.lost = False, ""

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        while True:
            if self._gone and content[:1] == b"\r" and b"\n" not in bytes(content):
                return len(content)  # a bar, ten times a second
            try:
                if self._is_full:
                    os.write(self._number, MISSING)
                written = os.write(self._number, content)
            except BlockingIOError:  # another program has made the terminal or pipe so
                select.select([], [self._number], [])
            except OSError as error:
                self.lost = os.strerror(error.errno or errno.EIO)
                if error.errno in FULL:
                    self._is_full = True
                    return len(content)
                self.go_to(None if self._gone else _folder, self.lost)
            else:
                self._is_full = False
                return written

    def go_to(self, folder: Path | None, why: str = "") -> None:
        """Lets the descriptor, for other writers too, stand for `FILE` in a folder; None: nothing.

        Does so only for a stream that is gone; `why` says that it is.
        """
        self._gone = self._gone or why
        if not self._gone:
            return
        file, first = os.open(os.devnull, os.O_WRONLY), b""
        with suppress(OSError):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                kept = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.close(file)
                file, who = kept, f"rank {os.environ.get('RANK', '0')}, process {os.getpid()}"
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                first = f"{now} {who}: {self._name}: {self._gone}; it goes on here\n".encode()
        os.dup2(file, self._number)
        os.close(file)
        with suppress(OSError):
            os.write(self._number, first)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)


def outlive_output_errors() -> None:
    """Replaces Python's own standard output and error by streams that do, also closed ones."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        try:
            os.fstat(number)
        except OSError:  # the next file that is opened would be taken for it
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        else:
            if stream is None and number:  # closed at the start, and taken by a file since then
                number = os.open(os.devnull, os.O_WRONLY)
        # Others than Python's own are those of a program that calls us.
        if number and stream is getattr(sys, f"__{name}__"):
            with suppress(OSError, ValueError):
                setattr(sys, name, _replaced(stream, number, name))


def print_to(folder: Path) -> None:
    """Names the folder of a training run, whose `FILE` gets what nobody reads."""
    global _folder
    _folder = folder
    for stream in (sys.stdout, sys.stderr):
        if (output := _output_of(stream)) is not None:
            output.go_to(folder)


def check_output(unread: bool = False) -> None:
    """Raises UserError if a part of standard output is lost.

    Args:
        unread: its reader may go before the end, as `head` does.
    """
    output = _output_of(sys.stdout)
    if output is not None:
        sys.stdout.flush()
        if output.lost and not (unread and output.lost == os.strerror(errno.EPIPE)):
            raise UserError(f"standard output: a part is lost: {output.lost.lower()}")


def _output_of(stream: Any) -> _Output | None:
    stream = getattr(stream, "stream", stream)  # below a progress bar
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Output) else None


def _replaced(stream: Any, number: int, name: str) -> io.TextIOWrapper:
    """A stream on the descriptor `number` in place of `stream`, which is None if it was closed."""
    if stream is not None:
        stream.flush()
        number = stream.fileno()
    words = {"stdout": "standard output", "stderr": "standard error"}[name]
    new = io.TextIOWrapper(
        io.BufferedWriter(_Output(number, words, "" if stream is not None else "closed")),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace",  # a path that ASCII does not have must not end a run
        line_buffering=True,  # a print of the user's own keeps its place in a log, and after a kill
    )
    for handler in stream_handlers():
        if handler.stream is stream:
            handler.setStream(new)
    return new


def stream_handlers() -> list[logging.StreamHandler[Any]]:
    """The handlers of all loggers that write to a stream which they have kept."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = [handler for logger in loggers for handler in getattr(logger, "handlers", [])]
    own = type(logging.lastResort)  # looks `sys.stderr` up at every record
    return [h for h in found if isinstance(h, logging.StreamHandler) and not isinstance(h, own)]
