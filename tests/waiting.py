"""Waits that end by an event. No test depends on how fast the machine is."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable

LIMIT_S = 600  # ends a test that hangs; no test takes as long


def without_waiting(printed: str) -> str:
    """The lines of `printed` that a fast machine prints too: not those of `long_wait`."""
    return re.sub(r"^.* \.\.\.( \d+ s)?\n", "", printed, flags=re.MULTILINE)


def wait_until(
    happened: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None
) -> None:
    """Returns when `happened()` is true.

    Args:
        what: the event, for the message.
        process: who brings the event about; its end before the event is an error at once.
    """
    end = time.monotonic() + LIMIT_S
    while not happened():
        if process is not None and process.poll() is not None and not happened():
            _, err = process.communicate()
            raise AssertionError(f"{what}: process ended with {process.returncode} before: {err}")
        assert time.monotonic() < end, f"{what}: did not happen within {LIMIT_S} s"
        time.sleep(0.01)
