"""What autograd keeps of decoder layers until backward: everything, some of it, or elsewhere.

Two measures that can be combined. Checkpointing keeps less and computes the rest again: "full"
keeps the input of a layer, "selective" also what products and attention gave, so that only norms,
rotations and silu are computed again. Offloading keeps things in host memory: what one layer keeps
leaves while the next one computes, and comes back while the next one computes gradients:

    computation   forward 0 | forward 1 | forward 2 | ... | backward 2 | backward 1 | backward 0
    copies                  | 0 to host | 1 to host | ... | 1 back     | 0 back     |

All that is kept goes through `torch.autograd.graph.saved_tensors_hooks`, what "selective" keeps
included, so either measure works on what the other leaves.
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

from qfsdp.cli.errors import InvalidField
from qfsdp.tensor_subclasses.kernels.host_memory import moved, to_host

Checkpointing = Literal["none", "full", "selective"]
Block = Callable[..., Tensor]

SMALLEST_OFFLOADED = 1 << 20  # bytes; smaller ones are not worth a copy of their own


@dataclass
class ActivationConfig:
    """Section `activation`: what is kept of the forward pass for the backward pass.

    Fields:
        checkpointing: "none" (keep everything), "full" (the input of a layer; the rest is computed
            again, for about a third more time), or "selective" (also products and attention;
            what is computed again is cheap). With `compile`, "selective" is "none": the compiler
            computes as much again by itself.
        every_n_layers: checkpoint every n-th layer only.
        offload: what is kept lies in host memory until backward needs it.
    """

    checkpointing: Checkpointing = "none"
    every_n_layers: int = 1
    offload: bool = False

    def check(self) -> None:
        if self.every_n_layers < 1:
            raise InvalidField("every_n_layers", self.every_n_layers, "an integer of at least 1")


def checkpointed(block: Block, mode: Checkpointing, *args: Any) -> Tensor:
    """`block(*args)`, of which autograd keeps what `mode` says."""
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
# hook sees them, so nothing could be offloaded, and raise when something runs in backward only, as
# FSDP2 does where linears are units. Results of products need no key but their order.


def _is_expensive(op: torch._ops.OpOverload) -> bool:
    """Products and attention: our own custom_op operations, and PyTorch's."""
    own = op.namespace in ("qfsdp", "torch_attn")  # the second has the variable-length kernel
    name = op.name()
    return own or name.startswith(("aten::mm", "aten::addmm", "aten::_scaled_dot_product"))


class _Keep(TorchDispatchMode):
    """Collects the results of expensive operations, as they come."""

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
    """Gives them out again, in order, instead of running the operations."""

    results: Callable[[], list[Any]]

    def __enter__(self) -> _Reuse:
        self._left = iter(self.results())
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_expensive(func):
            return tree_map_only(Tensor, Tensor.detach, next(self._left))
        return func(*args, **(kwargs or {}))


class _Hold(torch.autograd.Function):
    """A node that keeps tensors, and that backward never reaches."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


def _held_by_autograd(results: list[Any]) -> Callable[[], list[Any]]:
    """Lets autograd keep the tensors in `results`, so that hooks see them; the function that is
    returned gives `results` back."""
    leaves, structure = tree_flatten(results)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    # Up to torch 2.11 a node lives as long as its output, whoever else knows it.
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
        memory: all of it, 1-D; of the device or, if it is `away`, of the host.
        layer: whose it is.
    """

    __slots__ = ("__weakref__", "away", "layer", "memory")

    def __init__(self, memory: Tensor, layer: _Layer) -> None:
        self.memory, self.layer, self.away = memory, layer, False


class _Layer:
    """What is kept of one pass through one layer. Only autograd holds on to it: memory is free as
    soon as an operation has used it in backward."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = None if before is None else weakref.ref(before)
        self.ready = False  # backward has come here, and everything is on the device
        self._kept: list[weakref.ref[_Kept]] = []

    def keep(self, memory: Tensor) -> _Kept:
        kept = _Kept(memory, self)
        self._kept.append(weakref.ref(kept))
        return kept

    def still_kept(self, away: bool) -> list[_Kept]:
        kept = (ref() for ref in self._kept)
        return [one for one in kept if one is not None and one.away == away]


class Offload:
    """Keeps what autograd keeps of decoder layers in host memory; one serves all layers.

        with offload.layer(staying):
            y = block(x)

    Storages are copied whole, and once, however many operations keep views of them. A layer's
    leave the device when the next layer begins, so the last layer's, which backward needs at once,
    never do. On an accelerator copies have a stream of their own. The computation waits for those
    of a layer when the second one after it begins: what is kept of two layers is on the device at
    most, and no memory is used again before its copy is through. In backward one layer is fetched
    ahead. Copies of bytes change no bit of any gradient.

    Stays where it is: parameters and views of them, as FSDP2 frees and refills their memory (a
    packed weight is bytes of it); what is not floating point; what is smaller than
    `SMALLEST_OFFLOADED`.
    """

    def __init__(self) -> None:
        self._newest: _Layer | None = None
        self._stream: torch.Stream | None = None
        self._event: torch.Event | None = None  # the copies in flight
        self._in_flight: list[Tensor] = []  # the device memory they read or write

    @contextmanager
    def layer(self, staying: Iterable[Tensor]) -> Iterator[None]:
        """To be entered around the computation of a layer.

        Args:
            staying: tensors whose storages are left alone: parameters, and what all layers share.
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
            seen.clear()  # autograd alone decides how long something is kept

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, *view = packed
        if not kept.layer.ready:
            self._fetch(kept.layer)  # unless it is on its way already, or was never sent
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
            with self._beside_the_computation(leaving[0].memory.device):
                for kept in leaving:
                    kept.memory, kept.away = to_host(kept.memory), True
            layer.ready = False

    def _fetch(self, layer: _Layer) -> None:
        if coming := layer.still_kept(away=True):
            # Memory of the computation's stream, as it is the computation that frees it.
            places = [torch.empty_like(kept.memory, device=self._device) for kept in coming]
            self._in_flight += places
            with self._beside_the_computation(self._device):
                for kept, place in zip(coming, places, strict=True):
                    moved("to_device", place.nbytes)
                    kept.memory, kept.away = place.copy_(kept.memory, non_blocking=True), False

    @contextmanager
    def _beside_the_computation(self, device: torch.device) -> Iterator[None]:
        """For copies that begin when what is computed so far is through, and are not waited for."""
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
        """What is computed from here on finds all copies done."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._in_flight.clear()


def _worth_offloading(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or is_traceable_wrapper_subclass(tensor):
        return False
    of_parameter = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    return not of_parameter and tensor.untyped_storage().nbytes() >= SMALLEST_OFFLOADED
