"""Tells what is going on when something takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from qfsdp.common.errors import speaks_for_all
from qfsdp.common.progress import NOW
from qfsdp.common.terminal import say

SLOW_S = 5.0
LONGEST_SILENCE_S = 60.0


@contextmanager
def long_wait(text: str, seconds: float = SLOW_S, every: float | None = None) -> Iterator[None]:
    """Prints `text` and "..." on stderr once the `with` block has run for `seconds`; on rank 0.

    Prints it again after 20 s, 80 s and every further minute, or `every` so many seconds, with the
    time so far and the part that the work has come to (`progress.moved`).
    """
    ended, since = threading.Event(), time.monotonic()

    def tell() -> None:
        if ended.wait(seconds):
            return
        say(f"{text} ...")
        wait = every or 3 * (seconds or SLOW_S)
        while not ended.wait(wait):
            say(f"{text} ... {time.monotonic() - since:.0f} s{where()}")
            wait = every or min(4 * wait, LONGEST_SILENCE_S)

    if speaks_for_all():
        threading.Thread(target=tell, name="long_wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def where() -> str:
    """The part that the current work has come to: ", at model.layers.7", or ""."""
    return f", at {NOW.part}" if NOW.part else ""
