"""A part of a layer computed in tiles of tokens, forward and backward.

The feed-forward of a row of 524,288 tokens of an 8B model has temporaries of 15 GB, several at a
time. Every token is computed by itself, so the row can be walked in tiles:

    forward     for each tile: y[tile] = part(x[tile])                nothing is kept but x
    backward    for each tile: part(x[tile]) again, and its gradients

A quantized weight is dequantized once for each of the two walks. x itself is kept by a node of its
own that comes before the walk. So a checkpointed layer, which is computed again in backward up to
the last tensor that was kept, does not walk a third time.

Gradients of parameters are sums over tokens: they add up tile by tile in fp32, and differ from
those of a whole row in their last bits. Everything else has no sum over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qfsdp.modules.activations import held_by_autograd
from qfsdp.tensor_subclasses.frozen_weight import weights_held
from qfsdp.tensor_subclasses.kernels import dry_run

Part = Callable[[Tensor], Tensor]


def in_tiles(part: Part, x: Tensor, tile: int, modules: Sequence[nn.Module]) -> Tensor:
    """`part(x)`, for `tile` tokens at a time.

    Args:
        part: a function of each token by itself, without dropout: `[1, n, in]` -> `[1, n, in]`.
        x: `[batch, seq, in]`.
        modules: with the trained parameters that `part` uses.
    """
    if x.shape[:2].numel() <= tile:
        return part(x)
    if not torch.is_grad_enabled():
        return _forward(part, x, tile)
    kept = held_by_autograd([x])
    return _Tiled.apply(x, part, tile, modules, kept, *_trained(modules))


class _Tiled(torch.autograd.Function):
    """Parameters are arguments for their gradients only: `part` reads them from the modules."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        part: Part,
        tile: int,
        modules: Sequence[nn.Module],
        kept: Callable[[], list[Tensor]],
        *trained: Tensor,
    ) -> Tensor:
        ctx.given = part, tile, modules, kept
        return _forward(part, x, tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Backward never runs the node that keeps x. So its memory is freed here, not by autograd.
        (part, tile, modules, kept), ctx.given = ctx.given, None
        (x,), trained = kept(), _trained(modules)
        del kept
        sums = [torch.zeros_like(param, dtype=torch.float32) for param in trained]
        grad_x = x.new_empty(x.shape)
        with weights_held(), torch.enable_grad():
            for of_x, of_grad, into in _tiles(tile, x, grad, grad_x):
                leaf = of_x.detach().requires_grad_()
                found = torch.autograd.grad(part(leaf), [leaf, *trained], of_grad)
                into.copy_(found[0])
                for total, one in zip(sums, found[1:], strict=True):
                    total.add_(one)
        of_params = (total.to(param.dtype) for total, param in zip(sums, trained, strict=True))
        return grad_x, None, None, None, None, *of_params


@torch.no_grad()
def _forward(part: Part, x: Tensor, tile: int) -> Tensor:
    y = x.new_empty(x.shape)
    with weights_held():
        for of_x, into in _tiles(tile, x, y):
            into.copy_(part(of_x))
    return y


def _tiles(tile: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """`[1, tile, n]` of each tensor `[batch, seq, n]`, in order; the last tile may be shorter. In a
    dry run only the first two and the last: all others take the same memory."""
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    starts = list(range(0, flat[0].size(0), tile))
    if dry_run.current is not None and len(starts) > 3:
        starts = [*starts[:2], starts[-1]]
    for start in starts:
        yield [tensor[start : start + tile].unsqueeze(0) for tensor in flat]


def _trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [param for module in modules for param in module.parameters() if param.requires_grad]
