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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.modules.activation_offload import Offload as Offload
from qfsdp.modules.decoder_config import DecoderConfig

Checkpointing = Literal["none", "full", "selective"]
Block = Callable[..., Tensor]
LEAST_TILE = 1024  # tokens


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
        tile_tokens: tokens for which the feed-forward of a layer is computed at a time, forward and
            backward: for very long rows. "auto": as many as the hidden size, and at least 1,024.
            null: all at once. Needs "full" in every layer.
    """

    checkpointing: Checkpointing = "none"
    every_n_layers: int = 1
    offload: bool = False
    tile_tokens: int | Literal["auto"] | None = None

    def check(self) -> None:
        if self.every_n_layers < 1:
            raise InvalidField("every_n_layers", self.every_n_layers, "an integer of at least 1")
        if self.tile_tokens is None:
            return
        if self.tile_tokens != "auto" and self.tile_tokens < 1:
            raise InvalidField("tile_tokens", self.tile_tokens, "an integer of at least 1, or auto")
        if self.checkpointing != "full" or self.every_n_layers != 1:
            expected = "null, or checkpointing: full and every_n_layers: 1"
            raise InvalidField("tile_tokens", self.tile_tokens, expected)

    def tile_of(self, model: DecoderConfig) -> int | None:
        """Tokens of a tile. Raises UserError for a mixture: routing counts the tokens of a row."""
        if self.tile_tokens is not None and model.experts is not None:
            expected = "null: the model is a mixture of experts"
            raise UserError(f"activation.tile_tokens: {self.tile_tokens}; expected {expected}")
        by_size = max(LEAST_TILE, model.hidden_size)
        return by_size if self.tile_tokens == "auto" else self.tile_tokens


def checkpointed(block: Block, mode: Checkpointing, *args: Any) -> Tensor:
    """`block(*args)`, checkpointed as `mode` says."""
    if mode == "none":
        return block(*args)
    if mode == "full":
        return checkpoint(block, *args, use_reentrant=False)
    keep, reuse = _Keep(), _Reuse()
    y = checkpoint(block, *args, use_reentrant=False, context_fn=lambda: (keep, reuse))
    reuse.results = held_by_autograd(keep.taken())
    return y


# ---- selective checkpointing -----------------------------------------------------------------
# PyTorch has modes for this (`create_selective_checkpoint_contexts`). They keep results where no
# hook sees them, so nothing could be offloaded. And they raise for operations that run in backward
# only, as FSDP2's do if linears are units. Here results are told apart by their order alone.


def _is_expensive(op: torch._ops.OpOverload) -> bool:
    """Products and attention: qfsdp's custom ops, and PyTorch's that write to no argument."""
    if op._schema.is_mutable:
        return False
    own = op.namespace in ("qfsdp", "torch_attn")  # torch_attn has the variable-length kernel
    name = op.name()
    return own or name.startswith(("aten::mm", "aten::addmm", "aten::_scaled_dot_product"))


def _written(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> set[int]:
    """The storages that an operation writes to."""
    written = []
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[at] if at < len(args) else (kwargs or {}).get(argument.name))
    return _storages(written)


def _storages(tree: Any) -> set[int]:
    """The storages of the tensors in nested lists, tuples and dicts."""
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {leaf.untyped_storage()._cdata for leaf in leaves}


class _Keep(TorchDispatchMode):
    """Collects the results of expensive operations, in order, and whether each was written to.

    An operation that writes to a result runs again in backward. So a copy from before the write is
    kept, and backward gets a copy of that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: list[tuple[Any, bool]] = []
        self._needed = 0  # results before autograd kept its last tensor

    def __enter__(self) -> _Keep:
        # The hooks by which `checkpoint` learns what autograd keeps: the inner ones are called.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert hooks is not None
        pack, unpack = hooks

        def counted(kept: Tensor) -> Any:
            self._needed = len(self._results)
            return pack(kept)

        self._hooks = saved_tensors_hooks(counted, unpack)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hooks.__exit__()
        del self._hooks

    def taken(self) -> list[Any]:
        """The results that backward asks for: it computes the layer again up to the last tensor
        that autograd kept. None is left here, as autograd keeps hooks and so this object too."""
        results, self._results = self._results[: self._needed], []
        return results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            for at, (result, _) in enumerate(self._results):
                if written & _storages(result):
                    self._results[at] = tree_map_only(Tensor, torch.clone, result), True
        result = func(*args, **(kwargs or {}))
        if _is_expensive(func):
            # Aliases: autograd makes `result` itself part of its graph.
            self._results.append((tree_map_only(Tensor, Tensor.detach, result), False))
        return result


class _Reuse(TorchDispatchMode):
    """Returns these results, in order, instead of running the operations."""

    results: Callable[[], list[Any]]

    def __enter__(self) -> _Reuse:
        self._left = iter(self.results())
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_expensive(func) and (kept := next(self._left, None)) is not None:
            result, is_written = kept
            return tree_map_only(Tensor, torch.clone if is_written else Tensor.detach, result)
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


def held_by_autograd(results: list[Any]) -> Callable[[], list[Any]]:
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
