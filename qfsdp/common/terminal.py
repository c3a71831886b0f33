"""The terminal of a run: a progress bar in the last line, and everything else in lines above it.

While a bar is shown, whole lines that are written to `sys.stdout` and `sys.stderr` go above it:
warnings, `logging`, `print` of any package, from any thread. Other ranks and torchrun's agent are
processes of their own that write to the same terminal. They clear the bar's line first, and the bar
is drawn again below their text. What C++ code prints is not caught.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

from qfsdp.common.errors import speaks_for_all
from qfsdp.common.output import stream_handlers
from qfsdp.common.printable import printable, redacted

if TYPE_CHECKING:
    from tqdm import tqdm

LEAST_COLUMNS = 30  # a narrower terminal gets lines; one of 0 x 0 is not drawn at all
CLEAR_LINE = "\r\x1b[K"

_close: Callable[[], None] | None = None  # of the bar that is shown


def is_terminal() -> bool:
    """Whether standard error can show a bar: a terminal that knows its size and moves a cursor."""
    try:
        columns = os.get_terminal_size(screen().fileno()).columns
    except (OSError, ValueError, AttributeError):
        return False
    return columns >= LEAST_COLUMNS and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """The width of the terminal; 100 where there is none."""
    return os.get_terminal_size(screen().fileno()).columns if is_terminal() else 100


def screen() -> TextIO:
    """Standard error itself, also while text for it goes above a bar. Bars are drawn on it."""
    stream = sys.stderr
    return stream.stream if isinstance(stream, LinesAbove) else stream


def say(text: str) -> None:
    """Prints a line on standard error, of any process: above the bar, if there is one. What a
    terminal would obey, in names of files and errors of others, is shown as escapes."""
    text = printable(redacted(text))
    if not isinstance(sys.stderr, LinesAbove) and is_terminal():
        text = CLEAR_LINE + text
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Prints "warning: ..." as `say` does; every warning goes through here."""
    say(f"warning: {text}")


def bar(*args: Any, **kwargs: Any) -> tqdm[Any]:
    """A progress bar of tqdm on standard error; hidden where that is no terminal, and on ranks
    other than 0."""
    hidden = not speaks_for_all() or not is_terminal()
    kwargs["disable"] = kwargs.get("disable", False) or hidden
    from tqdm import tqdm

    return tqdm(*args, file=screen(), dynamic_ncols=True, **kwargs)


class LinesAbove:
    """A stream that writes whole lines above the bar.

    Text with a carriage return or an escape sequence and no line end is the bar of another package,
    and passes.

    Args:
        stream: the stream itself.
        cleared: a context manager for the time of a write: the bar is not on the screen.
        prefix: what each piece of text begins with.
    """

    def __init__(
        self, stream: TextIO, cleared: Callable[[], AbstractContextManager[Any]], prefix: str = ""
    ) -> None:
        self.stream, self._cleared, self._prefix = stream, cleared, prefix
        self._lock = threading.RLock()
        self._begun: dict[int, str] = {}  # by thread: a line without its end

    def write(self, text: str) -> int:
        with self._lock:
            if "\n" not in text and ("\r" in text or "\x1b" in text):
                self.stream.write(text)
            else:
                begun = self._begun.pop(threading.get_ident(), "")
                lines, end, begun = (begun + text).rpartition("\n")
                if begun:
                    self._begun[threading.get_ident()] = begun
                self._put(lines + end)
        return len(text)

    def end(self) -> None:
        """Ends and writes the lines that have no end."""
        with self._lock:
            for text in self._begun.values():
                self._put(f"{text}\n")
            self._begun.clear()

    def _put(self, text: str) -> None:
        if text:
            with self._cleared():
                self.stream.write(self._prefix + text)
                self.stream.flush()

    def __getattr__(self, name: str) -> Any:  # flush, isatty, fileno, encoding, ...
        return getattr(self.stream, name)


def keep_below(bar: tqdm[Any] | None) -> None:
    """Sends the text of this process above `bar` until `close_bar`.

    Args:
        bar: drawn on `screen()`; None on other ranks than the one that draws it. There each piece
            of text clears the line first.
    """
    global _close
    close_bar()
    if bar is None and not is_terminal():
        return
    from tqdm import tqdm

    before = (sys.stdout, sys.stderr)
    cleared = (lambda: tqdm.external_write_mode(file=screen())) if bar is not None else nullcontext
    prefixes = [CLEAR_LINE if bar is None and stream.isatty() else "" for stream in before]
    above = [LinesAbove(s, cleared, p) for s, p in zip(before, prefixes, strict=True)]
    replaced = dict(zip(before, above, strict=True))
    handlers = [(h, h.stream) for h in stream_handlers() if h.stream in replaced]
    for handler, stream in handlers:
        handler.setStream(replaced[stream])
    sys.stdout, sys.stderr = above  # type: ignore[assignment]

    def close() -> None:
        for stream in above:
            stream.end()
        for handler, stream in handlers:
            handler.setStream(stream)
        sys.stdout, sys.stderr = before
        if bar is not None:
            bar.close()

    _close = close


def close_bar() -> None:
    """Leaves the bar as it is; what is printed later stands below it. Does nothing without one."""
    global _close
    close, _close = _close, None
    if close is not None:
        close()


@contextmanager
def closed_at_end() -> Iterator[None]:
    """Closes the bar, whatever ends the `with` block."""
    try:
        yield
    finally:
        close_bar()
