"""Tensors that autograd keeps go to host memory until backward needs them; see `activations`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qfsdp.tensor_subclasses.kernels.host_memory import moved, to_host

SMALLEST_OFFLOADED = 1 << 20  # bytes; smaller tensors are not worth a copy


class _Kept:
    """A storage that autograd keeps.

    Fields:
        memory: the whole storage, 1-D, on the device or, if `away`, in host memory.
        layer: the layer that it belongs to.
    """

    __slots__ = ("__weakref__", "away", "layer", "memory")

    def __init__(self, memory: Tensor, layer: _Layer) -> None:
        self.memory, self.layer, self.away = memory, layer, False


class _Layer:
    """The storages kept for one pass through one layer. Only autograd owns them: their memory is
    free as soon as an operation in backward has used it."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = None if before is None else weakref.ref(before)
        self.ready = False  # backward has reached the layer, and everything is on the device
        self._kept: list[weakref.ref[_Kept]] = []

    def keep(self, memory: Tensor) -> _Kept:
        kept = _Kept(memory, self)
        self._kept.append(weakref.ref(kept))
        return kept

    def still_kept(self, away: bool) -> list[_Kept]:
        kept = (ref() for ref in self._kept)
        return [one for one in kept if one is not None and one.away == away]


class Offload:
    """Moves activations that autograd keeps to host memory; one instance serves all layers.

        with offload.layer(staying):
            y = block(x)

    Each storage is copied whole and once, even if several operations keep views of it. The storages
    of a layer leave the device when the next layer begins. Those of the last layer stay, as
    backward needs them at once. On an accelerator a separate stream copies. When the second layer
    after it begins, the computation waits for a layer's copies. So the device holds storages of at
    most two layers, and no memory is reused before its copy is done. Backward fetches one layer
    ahead. Copying bytes changes no bit of any gradient.

    Not moved: parameters and views of them, as FSDP2 frees and refills their memory (a quantized
    weight is bytes of it); tensors that are not floating point; tensors smaller than
    `SMALLEST_OFFLOADED`.
    """

    def __init__(self) -> None:
        self._newest: _Layer | None = None
        self._stream: torch.Stream | None = None
        self._event: torch.Event | None = None  # the copies in flight
        self._in_flight: list[Tensor] = []  # the device memory they read or write

    @contextmanager
    def layer(self, staying: Iterable[Tensor]) -> Iterator[None]:
        """A context for the computation of one layer.

        Args:
            staying: tensors whose storages are not moved: parameters, and tensors that all layers
                share.
        """
        if self._newest is not None:
            self._send(self._newest)
        layer = self._newest = _Layer(self._newest)
        stays = {tensor.untyped_storage()._cdata for tensor in staying}
        seen: dict[tuple[int, int, torch.dtype], _Kept] = {}

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata in stays or not _worth_offloading(tensor):
                return tensor.detach()  # a result that an operation keeps would keep itself alive
            key = (storage._cdata, tensor._version, tensor.dtype)
            if key not in seen:
                whole = (storage.nbytes() // tensor.itemsize,)
                seen[key] = layer.keep(tensor.detach().as_strided(whole, (1,), 0))
            return seen[key], tensor.shape, tensor.stride(), tensor.storage_offset()

        try:
            with saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            seen.clear()  # autograd alone decides how long a storage lives

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, *view = packed
        if not kept.layer.ready:
            self._fetch(kept.layer)  # does nothing if it was fetched ahead or never sent
            self._wait()
            kept.layer.ready = True
            before = kept.layer.before
            if before is not None and (layer := before()) is not None:
                self._fetch(layer)
        return kept.memory.as_strided(*view)

    def _send(self, layer: _Layer) -> None:
        self._wait()  # for the layer before that
        if leaving := layer.still_kept(away=False):
            self._in_flight += [kept.memory for kept in leaving]
            with self._on_copy_stream(leaving[0].memory.device):
                for kept in leaving:
                    kept.memory, kept.away = to_host(kept.memory), True
            layer.ready = False

    def _fetch(self, layer: _Layer) -> None:
        if coming := layer.still_kept(away=True):
            # Allocated on the computation's stream, which frees it.
            places = [torch.empty_like(kept.memory, device=self._device) for kept in coming]
            self._in_flight += places
            with self._on_copy_stream(self._device):
                for kept, place in zip(coming, places, strict=True):
                    moved("to_device", place.nbytes)
                    kept.memory, kept.away = place.copy_(kept.memory, non_blocking=True), False

    @contextmanager
    def _on_copy_stream(self, device: torch.device) -> Iterator[None]:
        """A context for copies that begin after the computation so far; nobody waits for them."""
        self._device = device
        if device.type == "cpu":
            yield
            return
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            yield
        self._event = self._stream.record_event()

    def _wait(self) -> None:
        """Makes the computation wait until all copies are done."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._in_flight.clear()


def _worth_offloading(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or is_traceable_wrapper_subclass(tensor):
        return False
    of_parameter = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    return not of_parameter and tensor.untyped_storage().nbytes() >= SMALLEST_OFFLOADED
