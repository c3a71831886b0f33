"""Checkpointing and offloading of the activations that autograd keeps for backward.

Both can be combined. Checkpointing keeps less and computes the rest again: "full" keeps the input
of a layer; "selective" also keeps the results of products and attention, and computes only norms,
rotations and silu again. Offloading keeps tensors in host memory. The tensors of one layer leave
the device while the next layer computes, and come back while the next layer computes gradients:

    computation   forward 0 | forward 1 | forward 2 | ... | backward 2 | backward 1 | backward 0
    copies                  | 0 to host | 1 to host | ... | 1 back     | 0 back     |

All kept tensors go through `torch.autograd.graph.saved_tensors_hooks`, also those of "selective".
So offloading applies to what checkpointing keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from qfsdp.common.errors import InvalidField
from qfsdp.tensor_subclasses.kernels.host_memory import moved, to_host

Checkpointing = Literal["none", "full", "selective"]
Block = Callable[..., Tensor]

SMALLEST_OFFLOADED = 1 << 20  # bytes; smaller tensors are not worth a copy


@dataclass
class ActivationConfig:
    """Section `activation`: what the forward pass keeps for the backward pass.

    Fields:
        checkpointing: "none" (keep everything), "full" (keep the input of a layer; computing the
            rest again takes about a third more time), or "selective" (also keep products and
            attention; the rest is cheap to compute again). With `compile`, "selective" is "none":
            the compiler computes as much again by itself.
        every_n_layers: checkpoint every n-th layer only.
        offload: keep tensors in host memory until backward needs them.
    """

    checkpointing: Checkpointing = "none"
    every_n_layers: int = 1
    offload: bool = False

    def check(self) -> None:
        if self.every_n_layers < 1:
            raise InvalidField("every_n_layers", self.every_n_layers, "an integer of at least 1")


def checkpointed(block: Block, mode: Checkpointing, *args: Any) -> Tensor:
    """`block(*args)`, checkpointed as `mode` says."""
    if mode == "none":
        return block(*args)
    if mode == "full":
        return checkpoint(block, *args, use_reentrant=False)
    keep, reuse = _Keep(), _Reuse()
    y = checkpoint(block, *args, use_reentrant=False, context_fn=lambda: (keep, reuse))
    reuse.results = _held_by_autograd(keep.results)
    return y


# ---- selective checkpointing -----------------------------------------------------------------
# PyTorch has modes for this (`create_selective_checkpoint_contexts`). They keep results where no
# hook sees them, so nothing could be offloaded. And they raise for operations that run in backward
# only, as FSDP2's do if linears are units. Here results are told apart by their order alone.


def _is_expensive(op: torch._ops.OpOverload) -> bool:
    """Products and attention: qfsdp's custom ops, and PyTorch's."""
    own = op.namespace in ("qfsdp", "torch_attn")  # torch_attn has the variable-length kernel
    name = op.name()
    return own or name.startswith(("aten::mm", "aten::addmm", "aten::_scaled_dot_product"))


class _Keep(TorchDispatchMode):
    """Collects the results of expensive operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_expensive(func):
            # Aliases: autograd makes `result` itself part of its graph.
            self.results.append(tree_map_only(Tensor, Tensor.detach, result))
        return result


class _Reuse(TorchDispatchMode):
    """Returns these results, in order, instead of running the operations."""

    results: Callable[[], list[Any]]

    def __enter__(self) -> _Reuse:
        self._left = iter(self.results())
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_expensive(func):
            return tree_map_only(Tensor, Tensor.detach, next(self._left))
        return func(*args, **(kwargs or {}))


class _Hold(torch.autograd.Function):
    """A graph node that keeps tensors. Backward never reaches it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


def _held_by_autograd(results: list[Any]) -> Callable[[], list[Any]]:
    """Lets autograd keep the tensors in `results`, so that hooks see them. Returns a function that
    gives `results` back."""
    leaves, structure = tree_flatten(results)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    # `again` refers to the output: up to torch 2.11 the node is freed with it.
    output: Any = _Hold.apply(torch.empty(0, requires_grad=True), *tensors)
    del results, leaves, tensors

    def again() -> list[Any]:
        held = iter(output.grad_fn.saved_tensors)
        filled = [next(held) if other is None else other[0] for other in others]
        return tree_unflatten(filled, structure)

    return again


# ---- offloading --------------------------------------------------------------------------------


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
    backward needs them at once. On an accelerator a separate stream copies. The computation waits
    for a layer's copies when the second layer after it begins: the device holds storages of at most
    two layers, and no memory is reused before its copy is done. Backward fetches one layer ahead.
    Copying bytes changes no bit of any gradient.

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
