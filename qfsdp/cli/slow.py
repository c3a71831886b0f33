"""Tells what is going on when something takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from qfsdp.cli.errors import speaks_for_all
from qfsdp.cli.terminal import say

SLOW_S = 5.0


@contextmanager
def told_if_slow(text: str, seconds: float = SLOW_S) -> Iterator[None]:
    """Prints `text` and "..." on stderr once the `with` block has run for `seconds`; on rank 0.

    Prints it again, with the time so far, whenever that has doubled twice: after 5, 20, 80 s, ...
    """
    ended, since = threading.Event(), time.monotonic()

    def tell() -> None:
        if ended.wait(seconds):
            return
        say(f"{text} ...")
        wait = 3 * (seconds or SLOW_S)
        while not ended.wait(wait):
            say(f"{text} ... {time.monotonic() - since:.0f} s")
            wait *= 4

    if speaks_for_all():
        threading.Thread(target=tell, name="told_if_slow", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
