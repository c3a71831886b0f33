"""The frozen base beside the accelerator: in host memory, or in the files of a packed model folder.

The base is read and never written, so nothing needs a swap file: a rank's rows of a packed weight
are one range of one file. They pass through a ring of pinned buffers, one unit of FSDP2 (a decoder
layer, or a linear) per buffer, which a thread fills ahead of their use:

    file --preadv, thread--> ring (bounded host memory) --copy stream--> device --all-gather--> unit

Which unit comes next is learned as the run goes: in a step the units come forward, backward, and
forward again (the norms of DoRA), and every step is like the one before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import torch
from torch import Tensor

from qfsdp.checkpoint.safetensors_read import StoredTensor, read_rows
from qfsdp.errors import UserError
from qfsdp.host import host_empty, in_host_memory, moved, to_device
from qfsdp.sizes import format_size
from qfsdp.tensor_subclasses.packed import PackedTensor

FORGET_AFTER = 1 << 14  # units; many steps


class Order:
    """In which order units are fetched: as they were in the step before.

    Which unit comes next is no function of the last one or two: after a forward pass the last layer
    is followed by the one before it, after the norms of DoRA by the first.
    """

    def __init__(self) -> None:
        self._seen: list[Hashable] = []
        self._at = -1  # in `_seen`; what follows there will follow now
        self._now: Hashable = None

    def guess(self, units: Sequence[Hashable]) -> None:
        """`units` will be fetched in this order, until another is seen."""
        self._seen, self._at = list(units), -1

    def saw(self, unit: Hashable) -> None:
        """Something of `unit` is fetched."""
        if unit == self._now:
            return
        self._at += 1
        if self._at >= len(self._seen) or self._seen[self._at] != unit:
            self._at = self._find(self._now, unit)
        self._seen.append(unit)
        self._now = unit
        if self._at > FORGET_AFTER:
            del self._seen[: self._at]
            self._at = 0

    def _find(self, before: Hashable, unit: Hashable) -> int:
        """Where `unit` came after `before` for the first time, or came at all."""
        pairs = zip([None, *self._seen], self._seen, strict=False)
        first = next((at for at, pair in enumerate(pairs) if pair == (before, unit)), None)
        if first is None:
            first = self._seen.index(unit) if unit in self._seen else len(self._seen)
        return first

    def next(self, count: int) -> list[Hashable]:
        """The units that will follow, `count` or as many as are known; the first is the one that
        is being fetched."""
        return [self._now, *self._seen[self._at + 1 : self._at + count]]


class Store:
    """Where the bytes of one weight lie (`qfsdp.tensor_subclasses.packed.Store`).

    Args:
        unit: the module of FSDP2 that is gathered with it.
        ahead: copies to the device ahead of use, where FSDP2 does not.
    """

    def __init__(self, unit: str, ahead: DeviceAhead | None) -> None:
        self.unit = unit
        self._ahead = ahead

    def fetch(self, weight: PackedTensor) -> Tensor:
        self.needed()
        return self.read(weight) if self._ahead is None else self._ahead.fetch(self, weight)

    def needed(self) -> None:
        """The weight is needed now, and not ahead of time."""

    def read(self, weight: PackedTensor) -> Tensor:
        """The rows of `weight` on its device, copied in the current stream."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether `read` would not wait for a disk."""
        return True


class HostStore(Store):
    """The bytes lie in host memory."""

    def empty(self, shape: Sequence[int]) -> Tensor:
        return host_empty(shape, torch.uint8)

    def read(self, weight: PackedTensor) -> Tensor:
        return to_device(weight.packed, weight.device)


class DiskStore(Store):
    """The bytes lie in a file; `ring` is set once it is known in which."""

    def __init__(self, unit: str, ahead: DeviceAhead | None) -> None:
        super().__init__(unit, ahead)
        self._nothing = torch.zeros(1, 1, dtype=torch.uint8)  # what `packed` is a view of
        self.ring: DiskRing | None = None

    def empty(self, shape: Sequence[int]) -> Tensor:
        return in_host_memory(self._nothing).expand(*shape)

    def needed(self) -> None:
        if self.ring is not None:
            self.ring.order.saw(self.unit)

    def read(self, weight: PackedTensor) -> Tensor:
        if self.ring is not None:
            return self.ring.read(self, weight.device)
        # A dry run: no file, but the same memory and the same ways.
        moved("from_disk", weight.packed.numel())
        moved("to_device", weight.packed.numel())
        return torch.empty(weight.packed.shape, dtype=torch.uint8, device=weight.device)

    def is_ready(self) -> bool:
        return self.ring is None or self.ring.is_ready(self)


class DeviceAhead:
    """Copies the next unit to the device while one computes, in a stream of its own.

    FSDP2 does so in the stream of its all-gathers, but not over one rank: there it copies a unit
    when it is needed, and the device waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._order = Order()
        self._weights: dict[Hashable, dict[Store, PackedTensor]] = {}  # by unit, as they were seen
        self._copied: dict[Store, tuple[Tensor, torch.Event | None]] = {}

    def fetch(self, store: Store, weight: PackedTensor) -> Tensor:
        """`store.read(weight)`, which may have been done."""
        self._weights.setdefault(store.unit, {})[store] = weight
        self._order.saw(store.unit)
        rows, event = self._copied.pop(store, (None, None))
        if rows is None:
            rows = store.read(weight)
        elif event is not None:
            stream = torch.accelerator.current_stream(rows.device)
            stream.wait_event(event)
            rows.record_stream(stream)
        units = self._order.next(2)
        for unit in units[1:]:
            self._copy(self._weights.get(unit, {}))
        # Not all that was copied is asked for: the norms of DoRA need the adapted weights only.
        for other in [s for s in self._copied if s.unit not in units]:
            del self._copied[other]
        return rows

    def _copy(self, weights: dict[Store, PackedTensor]) -> None:
        with self._stream or nullcontext():
            for store, weight in weights.items():
                if store not in self._copied and store.is_ready():
                    rows = store.read(weight)
                    event = None if self._stream is None else self._stream.record_event()
                    self._copied[store] = (rows, event)


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
