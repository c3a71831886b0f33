"""Lines that say what the demo is doing, at least every five seconds."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

QUIET_SECONDS = 4.0


def say(text: str) -> None:
    """Prints one line of the demo."""
    print(f"demo: {text}", flush=True)


@contextmanager
def working(task: str) -> Iterator[None]:
    """Prints `task`, then a line every four seconds until the block ends."""
    say(f"{task} ...")
    started, done = time.perf_counter(), threading.Event()

    def report() -> None:
        while not done.wait(QUIET_SECONDS):
            say(f"{task} ... {time.perf_counter() - started:.0f} s")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def run_command(task: str, command: Sequence[str]) -> int:
    """Runs a command and returns its exit status.

    Passes its output on, with a line after every four seconds without output.
    """
    started, last_output = time.perf_counter(), time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as process:
        assert process.stdout is not None
        output, done = process.stdout, threading.Event()

        def report() -> None:
            nonlocal last_output
            while not done.wait(0.5):
                now = time.perf_counter()
                if now - last_output > QUIET_SECONDS:
                    say(f"{task} ... {now - started:.0f} s")
                    last_output = now

        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        try:
            for line in iter(output.readline, b""):
                print(line.decode(errors="replace"), end="", flush=True)
                last_output = time.perf_counter()
        finally:
            done.set()
            reporter.join()
        return process.wait()
