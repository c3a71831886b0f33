"""The frozen base beside the accelerator: in host memory, or in the files of a packed model folder.

The base is read and never written, so nothing needs a swap file: a rank's rows of a packed weight
are one range of one file. They pass through a ring of pinned buffers, one unit of FSDP2 (a decoder
layer, or a linear) per buffer, which a thread fills ahead of their use:

    file --preadv, thread--> ring (bounded host memory) --copy stream--> device --all-gather--> unit

Which unit comes next is learned as the run goes: in a step the units come forward, backward, and
forward again (the norms of DoRA), and every step is like the one before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.kernels.host_memory import host_empty, in_host_memory, moved, to_device
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qfsdp.distributed.disk_ring import DiskRing

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
    """Where the bytes of one weight lie (`qfsdp.tensor_subclasses.quantized_tensor.Store`).

    Args:
        unit: the module of FSDP2 that is gathered with it.
        ahead: copies to the device ahead of use, where FSDP2 does not.
    """

    def __init__(self, unit: str, ahead: DeviceAhead | None) -> None:
        self.unit = unit
        self._ahead = ahead

    def fetch(self, weight: QuantizedTensor) -> Tensor:
        self.needed()
        return self.read(weight) if self._ahead is None else self._ahead.fetch(self, weight)

    def needed(self) -> None:
        """The weight is needed now, and not ahead of time."""

    def read(self, weight: QuantizedTensor) -> Tensor:
        """The rows of `weight` on its device, copied in the current stream."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether `read` would not wait for a disk."""
        return True


class HostStore(Store):
    """The bytes lie in host memory."""

    def empty(self, shape: Sequence[int]) -> Tensor:
        return host_empty(shape, torch.uint8)

    def read(self, weight: QuantizedTensor) -> Tensor:
        return to_device(weight.qdata, weight.device)


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

    def read(self, weight: QuantizedTensor) -> Tensor:
        if self.ring is not None:
            return self.ring.read(self, weight.device)
        # A dry run: no file, but the same memory and the same ways.
        moved("from_disk", weight.qdata.numel())
        moved("to_device", weight.qdata.numel())
        return torch.empty(weight.qdata.shape, dtype=torch.uint8, device=weight.device)

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
        self._weights: dict[
            Hashable, dict[Store, QuantizedTensor]
        ] = {}  # by unit, as they were seen
        self._copied: dict[Store, tuple[Tensor, torch.Event | None]] = {}

    def fetch(self, store: Store, weight: QuantizedTensor) -> Tensor:
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

    def _copy(self, weights: dict[Store, QuantizedTensor]) -> None:
        with self._stream or nullcontext():
            for store, weight in weights.items():
                if store not in self._copied and store.is_ready():
                    rows = store.read(weight)
                    event = None if self._stream is None else self._stream.record_event()
                    self._copied[store] = (rows, event)
