"""Limits that Linux sets for a container or for a job of a cluster: control groups, version 1 or 2.

Python and PyTorch tell the memory and the cores of the whole machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit() -> int | None:
    """Bytes that the processes around this one may take together; None: no limit."""
    limits = []
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # no such file, or "max"
                limits.append(int((group / name).read_text()))
    return min(limits, default=None)


def core_limit() -> int | None:
    """The same as cores that may run all the time, rounded up."""
    limits = []
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            limits.append(-(-int(quota) // int(period)))
        with suppress(OSError):
            quota, period = ((group / f"cpu.cfs_{n}_us").read_text() for n in ("quota", "period"))
            if int(quota) > 0:  # -1: no limit
                limits.append(-(-int(quota) // int(period)))
    return min(limits, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the groups with this process, those around a group too: any may have a limit.
    Within a container its own group may be called the root."""
    for line in OWN.read_text().splitlines() if OWN.is_file() else ():
        number, names, path = line.split(":", 2)
        if number == "0" or controller in names.split(","):
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):
                yield (ROOT if number == "0" else ROOT / controller) / group
