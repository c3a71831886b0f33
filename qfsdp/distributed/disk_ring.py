"""TODO distributed.disk_ring."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.read import StoredTensor, read_rows
from qfsdp.cli.errors import UserError
from qfsdp.cli.sizes import format_size
from qfsdp.distributed.stores import DiskStore, Order
from qfsdp.tensor_subclasses.kernels.host_memory import host_empty, moved, to_device


@dataclass
class _Range:
    """Rows of a stored tensor, and where in its unit's buffer they go."""

    stored: StoredTensor
    rows: range
    start: int

    @property
    def size(self) -> int:
        return len(self.rows) * self.stored.row_bytes


@dataclass(eq=False)
class _Slot:
    """One buffer of the ring.

    Fields:
        buffer: uint8, pinned where there is an accelerator.
        unit: what it holds, or is about to; None at the start.
        ready: set once that has been read, or has failed to be.
        error: what went wrong then.
        copied: the copies from it to the device; the buffer is not written before they are done.
    """

    buffer: Tensor
    unit: Hashable = None
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    copied: list[torch.Event] = field(default_factory=list)


class DiskRing:
    """Reads this rank's rows of the base, one unit ahead or several, within a bound of memory.

    Fill it with `add`, then `start` it. It ends with the process.

    Args:
        memory: bytes of host memory for all buffers together.

    Attributes:
        order: of the units.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._units: dict[Hashable, list[_Range]] = {}
        self._places: dict[DiskStore, _Range] = {}
        self._slots: list[_Slot] = []  # the one that was used last is at the end
        self.order = Order()
        self._wanted: Queue[tuple[_Slot, threading.Event]] = Queue()
        self._files: dict[Path, int] = {}

    def add(self, store: DiskStore, stored: StoredTensor, rows: range) -> None:
        """`store` keeps `rows` of `stored`; weights of one unit are read together."""
        ranges = self._units.setdefault(store.unit, [])
        start = ranges[-1].start + ranges[-1].size if ranges else 0
        ranges.append(_Range(stored, rows, start))
        self._places[store] = ranges[-1]

    def start(self) -> None:
        """Makes the buffers and reads the first units.

        Raises:
            UserError: the memory is less than two buffers take.
        """
        largest = max((r[-1].start + r[-1].size for r in self._units.values()), default=0)
        count = min(self._memory // max(largest, 1), len(self._units))
        if count < min(2, len(self._units)):
            raise UserError(
                f"sharding.ring_memory: {format_size(self._memory)}; one rank's part of a layer is "
                f"{format_size(largest)}, and two must fit: expected {2 * largest} bytes or more"
            )
        self._slots = [_Slot(host_empty([largest], torch.uint8)) for _ in range(count)]
        for store in self._places:
            store.ring = self
        threading.Thread(target=self._run, name="disk-ring", daemon=True).start()
        self.order.guess(list(self._units))
        self._look_ahead()

    def read(self, store: DiskStore, device: torch.device) -> Tensor:
        """uint8 `[rows, row_bytes]` of `store` on `device`, copied in the current stream."""
        slot = self._slot_of(store.unit) or self._begin(store.unit)
        self._slots.remove(slot)
        self._slots.append(slot)
        slot.ready.wait()
        if slot.error is not None:
            raise slot.error
        place = self._places[store]
        held = slot.buffer[place.start : place.start + place.size]
        rows = to_device(held.view(len(place.rows), place.stored.row_bytes), device)
        if device.type != "cpu":
            slot.copied.append(torch.accelerator.current_stream(device).record_event())
        self._look_ahead()
        return rows

    def is_ready(self, store: DiskStore) -> bool:
        """Whether `read` would not wait."""
        slot = self._slot_of(store.unit)
        return slot is not None and slot.ready.is_set()

    def _slot_of(self, unit: Hashable) -> _Slot | None:
        return next((slot for slot in self._slots if slot.unit == unit), None)

    def _begin(self, unit: Hashable, keep: Sequence[Hashable] = ()) -> _Slot:
        """Has the thread read `unit` into the buffer that has not been used for longest."""
        slot = next(s for s in self._slots if s.unit not in keep or s.unit is None)
        slot.unit, slot.error, slot.ready = unit, None, threading.Event()
        self._wanted.put((slot, slot.ready))
        return slot

    def _look_ahead(self) -> None:
        """Begins to read what will follow, as far as there are buffers for it."""
        units = self.order.next(len(self._slots))
        for at, unit in enumerate(units):
            if unit is not None and self._slot_of(unit) is None:
                self._begin(unit, keep=units[:at])

    def _run(self) -> None:
        while True:
            slot, ready = self._wanted.get()
            if slot.ready is not ready:
                continue  # given to another unit in the meantime
            try:
                for event in slot.copied:
                    event.synchronize()
                slot.copied.clear()
                for part in self._units[slot.unit]:
                    self._read_range(part, slot.buffer)
            except BaseException as error:  # told where the rows are asked for
                slot.error = error
            ready.set()

    def _read_range(self, part: _Range, buffer: Tensor) -> None:
        file = part.stored.file
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        into = buffer[part.start : part.start + part.size]
        read_rows(self._files[file], part.stored, part.rows.start, into)
        moved("from_disk", part.size)
