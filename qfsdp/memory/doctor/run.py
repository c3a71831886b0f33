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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.cli.secret_keys import is_secret

MODULE = "qfsdp.memory.doctor.checks"
# Every check with its title, and what to do if it is red and says nothing better itself.
ALONE = {
    "host": ("host memory, disk", "close other programs, free the disk; docs/guide/memory.md"),
    "models_cache": ("cache of models", "set HF_HOME to a folder that you can write to"),
    "versions": ("versions", "install qfsdp again in a fresh environment: pip install ."),
    "cards": ("cards", "`nvidia-smi` says whether the driver sees them; try another torch"),
    "links": ("links", "look for other programs with `nvidia-smi`; try NCCL_P2P_DISABLE=1"),
    "one_rank": ("QDoRA, one rank", "training would fail too: report it with output=FILE"),
    "compiler": ("compiler", "install g++; set TORCHINDUCTOR_CACHE_DIR to a local folder"),
}
# In one process per rank.
TOGETHER = {
    "gather": (
        "all-gather",
        "NCCL_DEBUG=INFO says more; try NCCL_P2P_DISABLE=1, "
        "GLOO_SOCKET_IFNAME=lo, in a container --shm-size=8g",
    ),
    "all_ranks": ("QDoRA, all ranks", "do not trust several ranks here: report with output=FILE"),
}
# A cold build takes 10 to 30 s of a core: it may take what the others have left.
LAST = {
    "kernels": ("compiled kernels", "QFSDP_EAGER_KERNELS=1 goes without; report it"),
}
CHECKS = ALONE | TOGETHER | LAST
SHARE = 3  # of the time: a check that hangs leaves two thirds to the others
LEAST_S = 3.0  # a check with less time left is not begun
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass
class Row:
    """What is known of a check.

    Fields:
        state: "green", "red", "not here".
        text: figures, or the reason.
        advice: one line for a red row.
        figures: for the JSON file.
    """

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
        seconds: for all checks together.
    """
    end = time.monotonic() + seconds
    limit = seconds / SHARE
    yield from _group(folder, list(ALONE), 1, ranks or 0, end, limit)
    count = ranks or _number_of_ranks(folder)
    if count > 1:
        yield from _group(folder, list(TOGETHER), count, count, end, limit)
    else:
        for name in TOGETHER:
            yield Row(name, "not here", "one rank; ranks=2 starts two", 0.0)
    yield from _group(folder, list(LAST), 1, ranks or 0, end, seconds)


def _number_of_ranks(folder: Path) -> int:
    from qfsdp.memory.doctor.checks import Case

    return Case(folder, 0).ranks


def _group(
    folder: Path, names: Sequence[str], size: int, ranks: int, end: float, limit: float
) -> Iterator[Row]:
    """Runs checks in one process per rank; processes for those that are left follow a red one."""
    left = list(names)
    while left:
        if end - time.monotonic() < LEAST_S:
            for name in left:
                text, advice = "no time was left", "run it again with seconds=300"
                yield Row(name, "red", text, 0.0, advice)
            return
        processes = _start(folder, left, size, ranks, end)
        try:
            while left:
                since = time.monotonic()
                row = _wait(folder, left[0], processes, min(end, since + limit))
                yield row
                left.pop(0)
                if row.state == "red":
                    break
        finally:
            _end(processes)


def _start(
    folder: Path, names: Sequence[str], size: int, ranks: int, end: float
) -> list[subprocess.Popen[bytes]]:
    base = {k: v for k, v in os.environ.items() if k not in OF_TORCHRUN}
    seconds = str(int(end - time.monotonic()) + 10)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if size > 1:
        base |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        base.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    started = []
    for rank in range(size):
        own = base | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {})
        command = [sys.executable, "-m", MODULE, str(folder), str(ranks), seconds, *names]
        with (folder / f"stderr.{rank}").open("wb") as errors:
            started.append(
                subprocess.Popen(
                    command,
                    env=own,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,
                )
            )
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
            return Row(name, worst[0].pop("state"), seconds=passed, **worst[0])
        for rank, status in enumerate(statuses):
            if status is not None and not files[rank].is_file():
                return Row(name, "red", _how_ended(folder, rank, len(processes), status), passed)
        if time.monotonic() > until:
            text = f"not finished within {passed:.0f} s"
            advice = f"on a slow machine seconds=300; if it hangs again: {CHECKS[name][1]}"
            return Row(name, "red", text, passed, advice)
        time.sleep(0.02)


def _how_ended(folder: Path, rank: int, size: int, status: int) -> str:
    text = (folder / f"stderr.{rank}").read_text(errors="replace").strip()
    last = text.splitlines()[-1] if text else ""
    which = f"rank {rank}" if size > 1 else "the process"
    if status < 0:
        with suppress(ValueError):
            return f"{which} was ended by {signal.Signals(-status).name}"
    return f"{which} ended with status {status}: {last}"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kills what has not ended, with its own children."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):  # a process in a driver's call cannot be killed
            process.wait(timeout=1)


def anonymous(text: str) -> str:
    """The text without what says who and where: secrets, the home folder, user, host, addresses."""
    secrets = [value for name, value in os.environ.items() if is_secret(name) and len(value) > 3]
    host = os.uname().nodename
    for value in [*secrets, os.path.expanduser("~").rstrip("/")]:
        if value:
            text = text.replace(value, "~" if value.startswith("/") else "***")
    names = [host, host.partition(".")[0]]
    with suppress(KeyError, OSError):
        names.append(getpass.getuser())
    for name in names:
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "***", text)
    text = re.sub(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])", "***", text)
    return re.sub(r"\b(hf_|sk-|ghp_)\w{8,}", "***", text)
