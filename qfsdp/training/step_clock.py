"""The time that the phases of training steps take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

from qfsdp.common import progress
from qfsdp.common.long_waits import long_wait


class StepClock:
    """Measures the time that the phases of training steps take.

        with clock.phase("forward"):
            loss = model(tokens)

    Phases of one name add up. Time in a phase within another phase counts for both. A profiler's
    trace shows each phase as a range. Compiled code cannot use phases.

    On an accelerator the time of a phase is that of its stream, measured by events without waiting
    for the device. Work of the host that the device does not wait for takes no time, such as
    collating a batch while the last step still runs.

    Args:
        tells: say so when a phase takes long; a dry run does not.

    Attributes:
        now: the innermost phase that runs; after an exception the phase that raised it.
    """

    def __init__(self, device: torch.device, tells: bool = True) -> None:
        self.now: str | None = None
        self._device, self._tells = device, tells
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of a `with` block to the phase `name`, unless the block raises."""
        outer, self.now = self.now, name
        with record_function(name), self._told(name), progress.phase(name):
            if self._device.type == "cpu":
                since = time.perf_counter()
                yield
                self._spent[name] += time.perf_counter() - since
            else:
                begin, end = _event(self._device), _event(self._device)
                begin.record()
                yield
                end.record()
                self._events.append((name, begin, end))
        self.now = outer

    def _told(self, name: str) -> AbstractContextManager[None]:
        """Says so if a phase takes long that has not ended before: it may compile kernels."""
        known = name in progress.NOW.ended or not self._tells
        return nullcontext() if known else long_wait(f"step {progress.NOW.step}: {name}")

    def seconds(self, wait: bool = True) -> dict[str, float]:
        """Seconds of each phase that ended since the last call.

        Args:
            wait: for the device; else phases that it still runs count for the next call.
        """
        running = []
        for name, begin, end in self._events:
            if not wait and not end.query():
                running.append((name, begin, end))
                continue
            end.synchronize()
            self._spent[name] += begin.elapsed_time(end) / 1000
        spent = dict(self._spent)
        self._spent.clear()
        self._events = running
        return spent


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device, enable_timing=True)
