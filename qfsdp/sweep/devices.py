"""The accelerators of this machine, and groups of them that cells run on at once."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from qfsdp.common.devices import accelerator_count, cores
from qfsdp.common.errors import UserError

T = TypeVar("T")
MOST_ON_A_CPU = 8  # ranks, or one for each core


def visible_devices() -> list[str]:
    """The names of the accelerators that this process may use, for CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(at) for at in range(accelerator_count())]


def check_devices(devices: Sequence[str], ranks: int) -> None:
    """Raises UserError if a cell has more ranks than devices, or than a machine without any runs:
    64 ranks on two cores took 19 GB and did not come to their first step."""
    if devices and len(devices) < ranks:
        raise UserError(f"world_size: {ranks}; expected at most the {len(devices)} visible devices")
    if not devices and ranks > (most := max(MOST_ON_A_CPU, cores())):
        raise UserError(f"world_size: {ranks}; expected at most {most} ranks without accelerators")


def groups_of(devices: Sequence[str], size: int) -> list[list[str]]:
    """`size` devices each; one group without any if there are fewer."""
    starts = range(0, len(devices) - size + 1, size)
    return [list(devices[at : at + size]) for at in starts] or [[]]


def on_free_groups(
    run: Callable[[T, list[str]], None], items: Sequence[T], groups: Sequence[list[str]]
) -> None:
    """Calls `run(item, group)` for every item, on as many groups at once as there are."""
    free: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for group in groups:
        free.put(group)

    def run_on_free(item: T) -> None:
        group = free.get()
        try:
            run(item, group)
        finally:
            free.put(group)

    if len(groups) == 1:  # in this thread, which Ctrl-C interrupts
        for item in items:
            run_on_free(item)
    else:
        with ThreadPoolExecutor(len(groups)) as pool:
            list(pool.map(run_on_free, items))
