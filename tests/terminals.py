"""A terminal of any size for a Python script, and what its screen shows at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from tests.tiny import ROOT
from tests.waiting import LIMIT_S


def screen_of(script: str, columns: int, rows: int = 24) -> list[str]:
    """Runs the script on a terminal; returns the lines that the terminal shows, and those that have
    scrolled up. Knows carriage returns and "clear the line", which is all that our bars use."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "RANK")}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait(LIMIT_S) == 0, written.decode()
    return [_shown(line) for line in written.decode().replace("\r\n", "\n").split("\n")]


def _shown(line: str) -> str:
    """A line of a terminal after all that was written to it."""
    shown: list[str] = []
    for part in line.split("\r"):
        if part.startswith("\x1b[K"):
            shown, part = [], part.removeprefix("\x1b[K")
        shown[: len(part)] = part
    return "".join(shown).rstrip()
