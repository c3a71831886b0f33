"""A ring of host buffers that a thread fills from disk, ahead of use.

The frozen base is only read, so offloading it to disk needs no swap file: a rank's rows of a
weight are one contiguous range of the model's own file. Each buffer holds one unit of FSDP2 (a
decoder layer or a linear):

    file --thread--> ring (bounded host memory) --copy stream--> device --all-gather--> unit

The thread reads the units that `FetchOrder` predicts: in a step they come forward, backward, and
forward again for the norms of DoRA, and every step repeats the one before. The ring knows no file
format; whoever adds a weight passes the function that reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from queue import Queue

import torch
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.common.sizes import format_size
from qfsdp.distributed.fetch_order import FetchOrder
from qfsdp.tensor_subclasses.kernels.host_memory import host_empty, moved


@dataclass(frozen=True)
class FileRows:
    """Rows of one weight in a file.

    Fields:
        rows: their number.
        row_bytes: bytes of one row.
        read_into: fills a contiguous uint8 tensor of `rows * row_bytes` with them. The ring calls
            it in its thread.
    """

    rows: int
    row_bytes: int
    read_into: Callable[[Tensor], None]

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class _Entry:
    """A weight's unit, its rows, and their first byte in the unit's buffer."""

    unit: Hashable
    source: FileRows
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.source.size


@dataclass(eq=False)
class _Slot:
    """One buffer of the ring.

    Fields:
        buffer: uint8, pinned where there is an accelerator.
        unit: the unit that it holds or is being filled with; None at the start.
        ready: set after the read has succeeded or failed.
        error: why the read failed, or None.
        copied: events of copies to the device; the buffer is not refilled before they finish.
    """

    buffer: Tensor
    unit: Hashable = None
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    copied: list[torch.Event] = field(default_factory=list)


class DiskRing:
    """Reads this rank's rows of the base one or more units ahead, in bounded host memory.

    Call `add` for every weight, then `start`. The thread ends with the process.

    Args:
        memory: bytes of host memory for all buffers together.

    Attributes:
        order: predicts the next units.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._units: dict[Hashable, list[_Entry]] = {}
        self._entries: dict[Hashable, _Entry] = {}
        self._slots: list[_Slot] = []  # least recently used first
        self.order = FetchOrder()
        self._requests: Queue[tuple[_Slot, threading.Event]] = Queue()

    def add(self, weight: Hashable, unit: Hashable, source: FileRows) -> None:
        """Registers a weight under the key `weight`; weights of one unit are read together."""
        entries = self._units.setdefault(unit, [])
        start = -(-entries[-1].stop // 8) * 8 if entries else 0  # numbers are read in place
        entries.append(_Entry(unit, source, start))
        self._entries[weight] = entries[-1]

    def start(self) -> None:
        """Allocates the buffers and starts to read the first units. Raises UserError: two buffers
        do not fit into the memory."""
        largest = max((entries[-1].stop for entries in self._units.values()), default=0)
        count = min(self._memory // max(largest, 1), len(self._units))
        if count < min(2, len(self._units)):
            raise UserError(
                f"sharding.ring_memory: {format_size(self._memory)}; one rank's part of a layer is "
                f"{format_size(largest)}, and two must fit: expected {2 * largest} bytes or more"
            )
        self._slots = [_Slot(host_empty([largest], torch.uint8)) for _ in range(count)]
        threading.Thread(target=self._run, name="disk-ring", daemon=True).start()
        self.order.guess(list(self._units))
        self._read_ahead()

    def read(self, weight: Hashable, into: Tensor) -> None:
        """Copies a weight to `into`, uint8 `[rows, row_bytes]`, in the current stream. Raises
        Exception: the error of `FileRows.read_into`."""
        entry = self._entries[weight]
        slot = self._slot_of(entry.unit) or self._request(entry.unit)
        self._slots.remove(slot)
        self._slots.append(slot)
        slot.ready.wait()
        if slot.error is not None:
            raise slot.error
        held = slot.buffer[entry.start : entry.stop]
        moved("to_device", into.nbytes)
        into.copy_(held.view(entry.source.rows, entry.source.row_bytes), non_blocking=True)
        if (device := into.device).type != "cpu":
            slot.copied.append(torch.accelerator.current_stream(device).record_event())
        self._read_ahead()

    def is_ready(self, weight: Hashable) -> bool:
        """Whether `read` returns without waiting for the disk."""
        slot = self._slot_of(self._entries[weight].unit)
        return slot is not None and slot.ready.is_set()

    def _slot_of(self, unit: Hashable) -> _Slot | None:
        return next((slot for slot in self._slots if slot.unit == unit), None)

    def _request(self, unit: Hashable, keep: Collection[Hashable] = ()) -> _Slot:
        """Asks the thread to read `unit` into the least recently used buffer not in `keep`."""
        slot = next(s for s in self._slots if s.unit not in keep or s.unit is None)
        slot.unit, slot.error, slot.ready = unit, None, threading.Event()
        self._requests.put((slot, slot.ready))
        return slot

    def _read_ahead(self) -> None:
        """Requests the predicted units, as many as there are buffers.

        The unit that was read last stays: its other weights are read next, also where the order
        is already ahead of it. Without this, two buffers took each other's place at every weight:
        the second step of six layers read 27 units instead of 9.
        """
        units = self.order.next(len(self._slots))
        last = self._slots[-1].unit
        for at, unit in enumerate(units):
            keep = {last, *units[:at]}
            if unit is not None and self._slot_of(unit) is None and len(keep) < len(self._slots):
                self._request(unit, keep=keep)

    def _run(self) -> None:
        while True:
            slot, ready = self._requests.get()
            if slot.ready is not ready:
                continue  # a later request gave the buffer to another unit
            try:
                for event in slot.copied:
                    event.synchronize()
                slot.copied.clear()
                for entry in self._units[slot.unit]:
                    entry.source.read_into(slot.buffer[entry.start : entry.stop])
                    moved("from_disk", entry.source.size)
            except BaseException as error:  # raised again by `read`
                slot.error = error
            ready.set()
