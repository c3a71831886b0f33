"""Autograd for adapted linears: what is kept for backward, and whose gradient is which.

The operations themselves are in `adapted_linear_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.modules.low_rank.product import backward_op, forward_op
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


class _AdaptedLinear(torch.autograd.Function):
    """The outputs of one to three linears with one input, with gradients for x, dropped, and every
    a and b. `_RatioGradient` adds that for ratios.

    Each a and b is an argument: Dynamo miscounts a variable number of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weights: Sequence[Tensor],
        metadata: Sequence[Tensor],
        ready: Ready | None,
        ratios: Sequence[Tensor],
        which: tuple[float, str, int, bool],  # scaling, format, row_offset, fp8
        a0: Tensor,
        b0: Tensor,
        a1: Tensor | None,
        b1: Tensor | None,
        a2: Tensor | None,
        b2: Tensor | None,
    ) -> tuple[Tensor, ...]:
        a = [factor for factor in (a0, a1, a2) if factor is not None]
        b = [factor for factor in (b0, b1, b2) if factor is not None]
        if ready is not None:
            a, b = [ready.a], list(ready.b)
        ctx.which, ctx.ready = which, ready is not None
        given = (weights, metadata, a, b, ratios)
        *outputs, z = forward_op(x, dropped, *given, *which, ctx.ready)
        ctx.sizes = [len(tensors) for tensors in given]
        ctx.save_for_backward(x, dropped, z, *(tensor for tensors in given for tensor in tensors))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, dropped, z, *saved), given = ctx.saved_tensors, []
        for size in ctx.sizes:
            given.append(saved[:size])
            saved = saved[size:]
        wants_x, rows = ctx.needs_input_grad[0], [b.size(0) for b in given[3]]
        grad_x, grad_dropped, grad_a, grad_b = backward_op(
            grads, x, dropped, *given, z, *ctx.which, ctx.ready, wants_x
        )
        factors: list[Tensor | None] = []
        for pair in zip(grad_a.chunk(len(rows)), grad_b.split(rows), strict=True):
            factors += pair
        factors += [None] * (6 - len(factors))
        of_x = grad_x if wants_x else None
        of_dropped = None if dropped is None or not wants_x else grad_dropped
        return of_x, of_dropped, None, None, None, None, None, *factors


class _RatioGradient(torch.autograd.Function):
    """y unchanged, with a gradient for the ratio that y contains; or for another factor of y's
    rows that the ratio contains, such as DoRA's magnitude."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ratio: Tensor) -> Tensor:
        ctx.save_for_backward(y, ratio)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, ratio = ctx.saved_tensors
        # Plain in a compiled layer: fused there into passes over y and its gradient.
        dots = _column_dots if torch.compiler.is_compiling() else _compiled_column_dots
        return grad, dots(grad.flatten(0, -2), y.flatten(0, -2)) / ratio


def _column_dots(g: Tensor, y: Tensor) -> Tensor:
    """The inner products of columns: `[tokens, n]` twice -> fp32 `[n]`."""
    return (g.float() * y.float()).sum(0)


_compiled_column_dots = compiled(_column_dots)


def with_row_gradient(y: Tensor, factor: Tensor) -> Tensor:
    """y, with a gradient for an fp32 `[out]` factor of its rows that it contains already."""
    return _RatioGradient.apply(y, factor)


class Ready(NamedTuple):
    """A and B of linears with one input, as they are multiplied.

    Fields:
        a: `[linears * rank, in]`, those of all linears below each other, in the compute dtype.
        b: `[out, rank]` each, scaling * ratio * B, in the compute dtype.
        ratios: fp32 `[out]` each, DoRA's magnitude / norm; () with LoRA.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    ratios: tuple[Tensor, ...]


MOST_TOGETHER = 3  # linears: queries, keys and values


def adapted_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scaling: float,
    ratios: Sequence[Tensor] = (),
    dropped: Tensor | None = None,
    ready: Ready | None = None,
    fp8: bool = False,
) -> list[Tensor]:
    """`ratio * (x @ weight.T + scaling * (dropped @ a.T) @ b.T)` of linears with one input.

    x meets the A of all in one product, and its gradient is one tensor that every linear adds to.
    A weight is dequantized just before its product: one at a time is in memory.

    Args:
        x: `[..., in]`, bf16 or fp32.
        weights: `[out, in]`, at most `MOST_TOGETHER`, frozen, quantized alike or plain.
        a, b: fp32 `[rank, in]` and `[out, rank]`, of one rank.
        ratios: fp32 `[out]`, DoRA's magnitude / norm; (): ones. They get no gradient.
        dropped: `[..., in]`, x after dropout; None: x itself.
        fp8: multiply by quantized weights in FP8 (`qfsdp.tensor_subclasses.fp8`).
        ready: what is multiplied in place of a, b and ratios; they only get gradients then.

    Returns:
        `[..., out]` each, of x's dtype, with gradients for x, dropped, a and b.
    """
    metadata: list[Tensor] = []
    which, plain = (scaling, "", 0, False), []
    for weight in weights:
        if isinstance(weight, QuantizedTensor):
            # Traced into a compiled layer, the check made it keep weights of norms for backward.
            if not torch.compiler.is_compiling():
                weight.check_product()
            which = (scaling, weight.format, weight.row_offset, fp8)
            metadata += weight.metadata
            weight = weight.qdata
        plain.append(weight)
    if ready is not None:
        ratios = ready.ratios
    factors: list[Tensor | None] = []
    for pair in zip(a, b, strict=True):
        factors += pair
    factors += [None] * (2 * MOST_TOGETHER - len(factors))
    given = (plain, metadata, ready, ratios, which)
    return list(_AdaptedLinear.apply(x, dropped, *given, *factors))


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    ratio: Tensor | None = None,
    dropped: Tensor | None = None,
    fp8: bool = False,
) -> Tensor:
    """`adapted_linears` for one, and with a gradient for the ratio."""
    ratios = () if ratio is None else (ratio.detach(),)
    (y,) = adapted_linears(x, [weight], [a], [b], scaling, ratios, dropped, fp8=fp8)
    return y if ratio is None else with_row_gradient(y, ratio)
