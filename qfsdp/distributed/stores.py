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
from qfsdp.tensor_subclasses.kernels.host_memory import host_empty, in_host_memory, moved, to_device
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
        return self.read(weight) if self._ahead is None else self._ahead.fetch(self, weight)

    def needed(self) -> None:
        """Records that the weight is needed now, not ahead of time."""

    def read(self, weight: QuantizedTensor) -> Tensor:
        """The rows of `weight` on its device, copied in the current stream."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether `read` returns without waiting for a disk."""
        return True


class HostStore(OffloadStore):
    """The bytes lie in host memory."""

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Unset host memory for the bytes."""
        return host_empty(shape, torch.uint8)

    def read(self, weight: QuantizedTensor) -> Tensor:
        return to_device(weight.qdata, weight.device)


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

    def read(self, weight: QuantizedTensor) -> Tensor:
        if self._ring is not None:
            return self._ring.read(self, weight.device)
        # A dry run has no file, but counts the same memory and copies.
        moved("from_disk", weight.qdata.numel())
        moved("to_device", weight.qdata.numel())
        return torch.empty(weight.qdata.shape, dtype=torch.uint8, device=weight.device)

    def is_ready(self) -> bool:
        return self._ring is None or self._ring.is_ready(self)


class DeviceAhead:
    """Copies the next unit to the device in a separate stream while the current one computes.

    FSDP2 does this in its all-gather stream, except on a single rank: there it copies a unit only
    when it is needed, and the device waits.
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
            rows = store.read(weight)
        elif event is not None:
            stream = torch.accelerator.current_stream(rows.device)
            stream.wait_event(event)
            rows.record_stream(stream)
        units = self._order.next(2)
        for unit in units[1:]:
            self._copy(self._weights.get(unit, {}))
        # Some copies are never asked for: the norms of DoRA need the adapted weights only.
        for other in [s for s in self._copied if s.unit not in units]:
            del self._copied[other]
        return rows

    def _copy(self, weights: dict[OffloadStore, QuantizedTensor]) -> None:
        with self._stream or nullcontext():
            for store, weight in weights.items():
                if store not in self._copied and store.is_ready():
                    rows = store.read(weight)
                    event = None if self._stream is None else self._stream.record_event()
                    self._copied[store] = (rows, event)
