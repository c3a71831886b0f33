"""Runs the checks of `qfsdp doctor` in child processes, and makes a row of each."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.cli.doctor.checks import CHECKS, Case
from qfsdp.common.devices import cores
from qfsdp.common.printable import is_secret

MODULE = "qfsdp.cli.doctor.checks"
SHARE = 3  # of the time: a check that hangs leaves two thirds to the others
LEAST_S = 3.0  # a check with less time left is not begun
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass
class Row:
    """What is known of a check: "green", "red" or "not here", with figures or the reason as text,
    a line of advice, and figures for the JSON file."""

    name: str
    state: str
    text: str
    seconds: float
    advice: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)


def rows(folder: Path, ranks: int | None, seconds: float) -> Iterator[Row]:
    """A row of each check, as it ends.

    Args:
        folder: an empty one, for what the checks write.
        ranks: None: one per card, two without cards.
        seconds: for all checks together; the last may take what the others have left.
    """
    end = time.monotonic() + seconds
    for when in ("first", "ranks", "last"):
        names = [name for name, check in CHECKS.items() if check.when == when]
        size = Case(folder, ranks or 0).ranks if when == "ranks" else 1
        if when == "ranks" and size == 1:
            yield from (
                Row(name, "not here", "one rank; ranks=2 starts two", 0.0) for name in names
            )
            continue
        while names:
            if end - time.monotonic() < LEAST_S:
                late = "no time was left", 0.0, "run it again with seconds=300"
                yield from (Row(name, "red", *late) for name in names)
                break
            limit = seconds if when == "last" else seconds / SHARE
            for row in _in_processes(folder, names, size, ranks or 0, end, limit):
                names.remove(row.name)
                yield row


def _in_processes(
    folder: Path, names: list[str], size: int, ranks: int, end: float, limit: float
) -> Iterator[Row]:
    """Rows of checks in one process per rank, up to the first red one."""
    processes = _start(folder, names, size, ranks, int(end - time.monotonic()) + 10)
    try:
        for name in [*names]:
            row = _wait(folder, name, processes, min(end, time.monotonic() + limit))
            yield row
            if row.state == "red":
                break
    finally:
        for process in processes:  # with their own children
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # one in a driver's call cannot be killed
                process.wait(timeout=1)


def _start(
    folder: Path, names: list[str], size: int, ranks: int, seconds: int
) -> list[subprocess.Popen[bytes]]:
    base = {k: v for k, v in os.environ.items() if k not in OF_TORCHRUN}
    if size > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        base |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        base.setdefault("OMP_NUM_THREADS", str(max(1, cores() // size)))
    command = [sys.executable, "-m", MODULE, str(folder), str(ranks), str(seconds), *names]
    started = []
    for rank in range(size):
        own = base | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {})
        with (folder / f"stderr.{rank}").open("wb") as out:
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            started.append(subprocess.Popen(command, env=own, start_new_session=True, **pipes))
    return started


def _wait(folder: Path, name: str, processes: list[subprocess.Popen[bytes]], until: float) -> Row:
    """The row of the check that processes are at: its own, or that they have ended or hang."""
    since = time.monotonic()
    files = [folder / f"{name}.{rank}.json" for rank in range(len(processes))]
    while True:
        statuses = [process.poll() for process in processes]  # before files are looked for
        found = [json.loads(file.read_text()) for file in files if file.is_file()]
        passed = time.monotonic() - since
        worst = [row for row in found if row["state"] == "red"] or found
        if worst and (len(found) == len(files) or worst[0]["state"] == "red"):
            return Row(name, seconds=passed, **worst[0])
        for rank, status in enumerate(statuses):
            if status is not None and not files[rank].is_file():
                return Row(name, "red", _how_ended(folder, rank, status), passed)
        if time.monotonic() > until:
            advice = f"on a slow machine seconds=300; if it hangs again: {CHECKS[name].advice}"
            return Row(name, "red", f"not finished within {passed:.0f} s", passed, advice)
        time.sleep(0.02)


def _how_ended(folder: Path, rank: int, status: int) -> str:
    lines = (folder / f"stderr.{rank}").read_text(errors="replace").strip().splitlines()
    with suppress(ValueError):
        return f"rank {rank} was ended by {signal.Signals(-status).name}"
    return f"rank {rank} ended with status {status}: {lines[-1] if lines else ''}"


def anonymous(text: str) -> str:
    """The text without what says who and where: secrets, the home folder, user, host, addresses."""
    for name, value in os.environ.items():
        if is_secret(name) and len(value) > 3:
            text = text.replace(value, "***")
    text = text.replace(os.path.expanduser("~").rstrip("/") or "~", "~")
    names = [os.uname().nodename, os.uname().nodename.partition(".")[0]]
    with suppress(KeyError, OSError):
        names.append(getpass.getuser())
    for name in filter(None, names):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "***", text)
    text = re.sub(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])", "***", text)
    return re.sub(r"\b(hf_|sk-|ghp_)\w{8,}", "***", text)
