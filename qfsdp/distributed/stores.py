"""Stores: where the bytes of offloaded weights lie, in host memory or in files.

FSDP2 fetches a weight's bytes before it gathers the weight; a store copies them to the device.
`DeviceAhead` copies them early where FSDP2 does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from qfsdp.common import progress
from qfsdp.distributed.disk_ring import DiskRing, FileRows
from qfsdp.distributed.fetch_order import FetchOrder
from qfsdp.tensor_subclasses.kernels.host_memory import HostBlocks, in_host_memory, moved
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


class OffloadStore:
    """Where the bytes of one weight lie (the `Store` protocol of `quantized_tensor`).

    Args:
        unit: name of the FSDP2 unit that the weight is gathered with.
        ahead: copies to the device ahead of use, where FSDP2 does not; else None.
    """

    def __init__(self, unit: str, ahead: DeviceAhead | None) -> None:
        self.unit = unit
        self._ahead = ahead

    def fetch(self, weight: QuantizedTensor) -> Tensor:
        """uint8 `[rows, row_bytes]` of `weight` on its device."""
        progress.moved(self.unit)
        self.needed()
        return self.rows(weight) if self._ahead is None else self._ahead.fetch(self, weight)

    def rows(self, weight: QuantizedTensor) -> Tensor:
        """`fetch`, in the current stream."""
        into = place(weight)
        self.read(weight, into)
        return into

    def needed(self) -> None:
        """Records that the weight is needed now, not ahead of time."""

    def read(self, weight: QuantizedTensor, into: Tensor) -> None:
        """Copies the rows of `weight` in the current stream."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether `read` returns without waiting for a disk."""
        return True


class HostStore(OffloadStore):
    """The bytes lie in host memory.

    Args:
        unit, ahead: as above.
        blocks: gives the memory; None: of its own.
        rows: of a rank's shard with FSDP2's padding.
    """

    def __init__(
        self, unit: str, ahead: DeviceAhead | None, blocks: HostBlocks | None = None, rows: int = 0
    ) -> None:
        super().__init__(unit, ahead)
        self._blocks, self._rows = blocks or HostBlocks(), rows
        self._padded: Tensor | None = None

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Unset host memory for the bytes. FSDP2 copies a shard with fewer rows than others into
        one with padding, which gets the same memory: blocks take nothing back."""
        rows, row_bytes = shape
        if rows == self._rows and self._padded is not None:
            return self._padded
        held = max(rows, self._rows)
        memory = self._blocks.take(held * row_bytes).view(held, row_bytes)
        self._padded = memory if rows < held else None
        return memory[:rows]

    def read(self, weight: QuantizedTensor, into: Tensor) -> None:
        moved("to_device", into.nbytes)
        into.copy_(weight.qdata, non_blocking=True)


class DiskStore(OffloadStore):
    """The bytes lie in a file and come through a `DiskRing` (`attach`)."""

    def __init__(self, unit: str, ahead: DeviceAhead | None) -> None:
        super().__init__(unit, ahead)
        self._nothing = torch.zeros(1, 1, dtype=torch.uint8)
        self._ring: DiskRing | None = None

    def attach(self, ring: DiskRing, source: FileRows) -> None:
        """From now on the bytes come from `source`, through `ring`."""
        ring.add(self, self.unit, source)
        self._ring = ring

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A tensor of this shape that takes one byte of memory."""
        return in_host_memory(self._nothing).expand(*shape)

    def needed(self) -> None:
        if self._ring is not None:
            self._ring.order.saw(self.unit)

    def read(self, weight: QuantizedTensor, into: Tensor) -> None:
        if self._ring is not None:
            self._ring.read(self, into)
        else:  # a dry run has no file, but counts the same copies
            moved("from_disk", into.nbytes)
            moved("to_device", into.nbytes)

    def is_ready(self) -> bool:
        return self._ring is None or self._ring.is_ready(self)


def place(weight: QuantizedTensor) -> Tensor:
    """Unset memory for the bytes of `weight` on its device."""
    return torch.empty(weight.qdata.shape, dtype=torch.uint8, device=weight.device)


class DeviceAhead:
    """Copies the next unit to the device in a separate stream while the current one computes.

    FSDP2 does this in its all-gather stream, except on a single rank: there it copies a unit only
    when it is needed, and the device waits.

    The memory is allocated in the computation's stream, which may use it again as soon as the host
    frees it. That of another stream is free only when the device has come so far: the host, which
    runs 15 to 25 layers ahead, would take as many units (7 to 11 GB of a 70B model; reasoned from
    the allocator, not measured).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._order = FetchOrder()
        # By unit, in the order in which its weights were first fetched.
        self._weights: dict[Hashable, dict[OffloadStore, QuantizedTensor]] = {}
        self._copied: dict[OffloadStore, tuple[Tensor, torch.Event | None]] = {}

    def fetch(self, store: OffloadStore, weight: QuantizedTensor) -> Tensor:
        """`store.read(weight)`, from the copy made ahead if there is one."""
        self._weights.setdefault(store.unit, {})[store] = weight
        self._order.saw(store.unit)
        rows, event = self._copied.pop(store, (None, None))
        if rows is None:
            rows = store.rows(weight)
        self._wait(event)
        units = self._order.next(2)
        for unit in units[1:]:
            self._copy(self._weights.get(unit, {}))
        # Some copies are never asked for: the norms of DoRA need the adapted weights only.
        for other in [s for s in self._copied if s.unit not in units]:
            self._wait(self._copied.pop(other)[1])
        return rows

    def _copy(self, weights: dict[OffloadStore, QuantizedTensor]) -> None:
        missing = [s for s in weights if s not in self._copied and s.is_ready()]
        places = {store: place(weights[store]) for store in missing}
        if self._stream is not None and places:  # the computation may still use that memory
            self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream or nullcontext():
            for store, rows in places.items():
                store.read(weights[store], rows)
                event = None if self._stream is None else self._stream.record_event()
                self._copied[store] = (rows, event)

    def _wait(self, event: torch.Event | None) -> None:
        """Makes the computation wait for a copy, before it or a later tensor uses the memory."""
        if self._stream is not None and event is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(event)
