"""The product of sorted rows with frozen experts and their low-rank products, as one operation.

    y[i] = ratio[e] * (W[e] x[i] + scaling * B[e] A[e] x[i])        e: the expert of row i

As `adapted_linears` of one weight, with the products of `expert_product`. Kept for backward are
the inputs, `A x` (`rank` numbers per row) and the bytes of W, which is dequantized again. A or B
may be one for all experts; it is repeated while it is multiplied, and its gradient is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.modules.experts.product import (
    CHUNK_BYTES,
    expert_product,
    takes_grouped,
    weight_gradient,
)
from qfsdp.modules.low_rank.product import scaled_b
from qfsdp.tensor_subclasses.frozen_weight import bytes_of
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op

# Numbers at a time in the gradient of the ratio: 128 MB in fp32.
RATIO_NUMBERS = 1 << 25


@custom_op("qfsdp::adapted_experts")
def _adapted_experts(
    x: Tensor,
    dropped: Tensor | None,
    ends: Tensor,
    weight: Tensor,
    metadata: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    ratio: Tensor | None,
    scaling: float,
    format: str,
    row_offset: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    cols = x.size(1)
    a, b = of_all(a, ends.numel() * b.size(1)), of_all(b, weight.size(0))
    a, b = _as_multiplied(x, ends, a, scaled_b(b, ratio, scaling, x.dtype))
    z = expert_product(x if dropped is None else dropped, ends, a, (), cols)
    w = (weight, metadata, cols, format, row_offset, ratio)
    y = expert_product(x, ends, *w, chunk_bytes=chunk)
    return y.add_(expert_product(z, ends, b, (), b.size(1))), z


@custom_op("qfsdp::adapted_experts_backward")
def _adapted_experts_backward(
    grad: Tensor,
    x: Tensor,
    dropped: Tensor | None,
    ends: Tensor,
    weight: Tensor,
    metadata: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    ratio: Tensor | None,
    z: Tensor,
    scaling: float,
    format: str,
    row_offset: int,
    chunk: int,
    wants_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dropped, a and b; empty tensors for those that do not exist."""
    cols, rank, experts = x.size(1), b.size(1), ends.numel()
    own_a, own_b = of_all(a, experts * rank), of_all(b, weight.size(0))
    own_a, own_b = _as_multiplied(x, ends, own_a, scaled_b(own_b, ratio, scaling, grad.dtype))
    grad_z = expert_product(grad, ends, own_b, (), own_b.size(1), transposed=True)
    # Without the padding of the rank.
    grad_b = weight_gradient(grad, z, ends)[:, :rank].float()
    grad_b = scaled_b(grad_b, ratio, scaling, torch.float32).contiguous()
    grad_b = grad_b.view(-1, *b.shape).sum(0) if len(b) < len(grad_b) else grad_b
    grad_a = weight_gradient(grad_z, x if dropped is None else dropped, ends)
    grad_a = grad_a.view(experts, -1, cols)[:, :rank].float()
    grad_a = grad_a.sum(0) if len(a) == rank else grad_a.reshape(a.shape)
    # Two empty tensors: outputs of a custom op must be different tensors.
    grad_x, grad_dropped = (grad.new_empty(0) for _ in range(2))
    if wants_x:
        through_a = expert_product(grad_z, ends, own_a, (), cols, transposed=True)
        w = (weight, metadata, cols, format, row_offset, ratio)
        grad_x = expert_product(grad, ends, *w, transposed=True, chunk_bytes=chunk)
        if dropped is None:
            grad_x += through_a
        else:
            grad_dropped = through_a
    return grad_x, grad_dropped, grad_a, grad_b


def of_all(factor: Tensor, rows: int) -> Tensor:
    """A or B with the rows of all experts, from one that they share."""
    return factor if len(factor) == rows else factor.repeat(rows // len(factor), 1)


def _as_multiplied(x: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A `[experts * rank, in]` in x's dtype, and B `[experts * out, rank]`, as they are multiplied.

    `grouped_mm` needs rows of a multiple of 16 bytes. So other ranks than multiples of 8 are filled
    up with zeros where it would be used: rank 2 costs as much as rank 8.
    """
    experts, rank = ends.numel(), b.size(1)
    a, filled = a.to(x.dtype), -(-rank // 8) * 8
    if filled != rank and takes_grouped(x, experts, filled, a.size(1), b.size(0) // experts):
        a = F.pad(a.view(experts, rank, -1), (0, 0, 0, filled - rank)).flatten(0, 1)
        b = F.pad(b, (0, filled - rank))
    return a, b


@custom_op("qfsdp::expert_ratio_gradient")
def _expert_ratio_gradient(grad: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Per expert, the inner products of columns: `[rows, out]` twice -> fp32 `[experts * out]`.

    In pieces of columns: whole, the fp32 products would be twice the size of a bf16 y. Without
    atomic additions, so that the same run has the same bits.
    """
    lengths = ends.long().diff(prepend=ends.new_zeros(1))
    dots = torch.zeros(ends.numel(), y.size(1), dtype=torch.float32, device=y.device)
    step = max(1, RATIO_NUMBERS // max(1, y.size(0)))
    for start in range(0, y.size(1) if y.size(0) else 0, step):
        part = slice(start, start + step)
        products = grad[:, part].float() * y[:, part].float()
        # unsafe: the host does not wait to check the lengths.
        dots[:, part] = torch.segment_reduce(products, "sum", lengths=lengths, unsafe=True)
    return dots.flatten()


@torch.library.register_fake("qfsdp::adapted_experts")
def _(x: Tensor, dropped: Any, ends: Tensor, weight: Tensor, metadata: Any, *rest: Any) -> Any:
    a, b = of_all(rest[0], ends.numel() * rest[1].size(1)), of_all(rest[1], weight.size(0))
    _, b = _as_multiplied(x, ends, a, b)
    return x.new_empty(x.size(0), b.size(0) // ends.numel()), x.new_empty(x.size(0), b.size(1))


@torch.library.register_fake("qfsdp::adapted_experts_backward")
def _(grad: Tensor, x: Tensor, dropped: Any, ends: Any, weight: Any, *rest: Any) -> Any:
    a, b, wants_x = rest[1], rest[2], rest[-1]
    return (
        x.new_empty(x.shape if wants_x else 0),
        x.new_empty(x.shape if wants_x and dropped is not None else 0),
        a.new_empty(a.shape),
        b.new_empty(b.shape),
    )


@torch.library.register_fake("qfsdp::expert_ratio_gradient")
def _(grad: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return y.new_empty(ends.numel() * y.size(1), dtype=torch.float32)


class _AdaptedExperts(torch.autograd.Function):
    """y, with gradients for x, dropped, a and b. `_RatioGradient` adds that for ratio."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        ends: Tensor,
        weight: Tensor,
        metadata: Sequence[Tensor],
        a: Tensor,
        b: Tensor,
        ratio: Tensor | None,
        which: tuple[float, str, int, int],  # scaling, format, row_offset, chunk
    ) -> Tensor:
        ctx.which = which
        y, z = _adapted_experts(x, dropped, ends, weight, metadata, a, b, ratio, *which)
        ctx.save_for_backward(x, dropped, ends, weight, a, b, ratio, z, *metadata)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dropped, ends, weight, a, b, ratio, z, *metadata = ctx.saved_tensors
        wants_x = ctx.needs_input_grad[0]
        grad_x, grad_dropped, grad_a, grad_b = _adapted_experts_backward(
            grad, x, dropped, ends, weight, metadata, a, b, ratio, z, *ctx.which, wants_x
        )
        of_x = grad_x if wants_x else None
        of_dropped = None if dropped is None or not wants_x else grad_dropped
        return of_x, of_dropped, None, None, None, grad_a, grad_b, None, None


class _RatioGradient(torch.autograd.Function):
    """y unchanged, with a gradient for the ratio that y contains."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ratio: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(y, ratio, ends)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, ratio, ends = ctx.saved_tensors
        return grad, _expert_ratio_gradient(grad, y, ends) / ratio, None


def adapted_experts(
    x: Tensor,
    ends: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    ratio: Tensor | None = None,
    dropped: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """`adapted_linears` of rows that are sorted by expert, computed in x's dtype.

    Args:
        x: `[rows, in]`, bf16 or fp32, sorted by expert.
        ends: int32 `[experts]`, where each expert's rows end.
        weight: `[experts * out, in]`, frozen, quantized or plain of x's dtype.
        a, b: fp32 `[experts * rank, in]` and `[experts * out, rank]`. Either may be one that all
            experts share: `[rank, in]`, `[out, rank]`.
        ratio: fp32 `[experts * out]`, DoRA's magnitude / norm; None: ones.
        dropped: `[rows, in]`, x after dropout; None: x itself.
        chunk_bytes: of dequantized experts at a time.

    Returns:
        `[rows, out]` of x's dtype, with gradients for x, dropped, a, b and ratio. Experts without
        rows have gradients of zero.
    """
    held, metadata, format, first = bytes_of(weight)
    which = (scaling, format, first, chunk_bytes)
    y = _AdaptedExperts.apply(x, dropped, ends, held, metadata, a, b, ratio, which)
    return y if ratio is None else _RatioGradient.apply(y, ratio, ends)
