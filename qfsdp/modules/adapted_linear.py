"""A frozen linear and its low-rank product as one operation, with gradients written out.

    y = ratio * (W x + scaling * B A x)          ratio[i] per output row; all ones without DoRA

The dequantize kernel and B take `ratio` in, as it multiplies rows of W and B. So DoRA needs no pass
over activations in forward. y is linear in ratio, so the gradient of ratio needs no product:

    d loss / d ratio[i] = sum over tokens of grad[t, i] * y[t, i] / ratio[i]

Most consumers of y keep it anyway. The products with W and B are added in place, and so are their
gradients for x: the sum is rounded once and needs no separate pass over the output (235 MB for
8,192 tokens of an 8B model's feed-forward). Custom ops: see `quantized_linear` for the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.tensor_subclasses.fp8 import backward_product, forward_product
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor, frozen_weight


@custom_op("qfsdp::adapted_linear")
def _adapted_linear(
    x: Tensor,
    dropped: Tensor | None,
    weight: Tensor,
    metadata: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    ratio: Tensor | None,
    scaling: float,
    format: str,
    row_offset: int,
    fp8: bool,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    z = (x if dropped is None else dropped).flatten(0, -2) @ a.to(dtype).t()
    of_b = scaled_b(b, ratio, scaling, dtype)
    if fp8:
        flat = x.flatten(0, -2)
        y = forward_product(flat, weight, metadata, format, row_offset, ratio)
        return y.addmm_(z, of_b.t()).view(*x.shape[:-1], -1), z
    y = z @ of_b.t()
    w = frozen_weight(weight, metadata, format, x.size(-1), row_offset, dtype, ratio)
    y.addmm_(x.flatten(0, -2), w.t())
    return y.view(*x.shape[:-1], -1), z


@custom_op("qfsdp::adapted_linear_backward")
def _adapted_linear_backward(
    grad: Tensor,
    x: Tensor,
    dropped: Tensor | None,
    weight: Tensor,
    metadata: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    ratio: Tensor | None,
    z: Tensor,
    scaling: float,
    format: str,
    row_offset: int,
    fp8: bool,
    wants_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dropped, a and b; empty tensors for those that do not exist."""
    dtype, g = grad.dtype, grad.flatten(0, -2)
    grad_z = g @ scaled_b(b, ratio, scaling, dtype)
    grad_b = scaled_b((g.t() @ z).float(), ratio, scaling, torch.float32)
    # Two empty tensors: outputs of a custom op must be different tensors.
    grad_x, grad_dropped = (grad.new_empty(0) for _ in range(2))
    if wants_x and fp8:
        base = backward_product(g, weight, metadata, format, x.size(-1), row_offset, ratio)
        if dropped is None:
            grad_x = base.addmm_(grad_z, a.to(dtype)).view_as(x)
        else:
            grad_dropped, grad_x = (grad_z @ a.to(dtype)).view_as(x), base.view_as(x)
    elif wants_x:
        w = frozen_weight(weight, metadata, format, x.size(-1), row_offset, dtype, ratio)
        through_a = grad_z @ a.to(dtype)
        if dropped is None:
            grad_x = through_a.addmm_(g, w).view_as(x)
        else:
            grad_dropped, grad_x = through_a.view_as(x), (g @ w).view_as(x)
    grad_a = (grad_z.t() @ (x if dropped is None else dropped).flatten(0, -2)).float()
    return grad_x, grad_dropped, grad_a, grad_b


def scaled_b(b: Tensor, ratio: Tensor | None, scaling: float, dtype: torch.dtype) -> Tensor:
    """scaling * ratio * B, multiplied in fp32 and rounded once."""
    b = b * scaling
    return (b if ratio is None else b * ratio.unsqueeze(1)).to(dtype)


@torch.library.register_fake("qfsdp::adapted_linear")
def _(x: Tensor, dropped: Any, weight: Tensor, metadata: Any, a: Tensor, *_: Any) -> Any:
    tokens = x.flatten(0, -2).size(0)
    return x.new_empty(*x.shape[:-1], weight.size(0)), x.new_empty(tokens, a.size(0))


@torch.library.register_fake("qfsdp::adapted_linear_backward")
def _(grad: Tensor, x: Tensor, dropped: Any, weight: Any, metadata: Any, *rest: Any) -> Any:
    a, b, wants_x = *rest[:2], rest[-1]
    return (
        torch.empty_like(x) if wants_x else grad.new_empty(0),
        torch.empty_like(x) if wants_x and dropped is not None else grad.new_empty(0),
        torch.empty_like(a),
        torch.empty_like(b),
    )


class _AdaptedLinear(torch.autograd.Function):
    """y, with gradients for x, dropped, a and b. `_RatioGradient` adds that for ratio."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        metadata: Sequence[Tensor],
        a: Tensor,
        b: Tensor,
        ratio: Tensor | None,
        which: tuple[float, str, int, bool],  # scaling, format, row_offset, fp8
    ) -> Tensor:
        ctx.which = which
        y, z = _adapted_linear(x, dropped, weight, metadata, a, b, ratio, *which)
        ctx.save_for_backward(x, dropped, weight, a, b, ratio, z, *metadata)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dropped, weight, a, b, ratio, z, *metadata = ctx.saved_tensors
        wants_x = ctx.needs_input_grad[0]
        grad_x, grad_dropped, grad_a, grad_b = _adapted_linear_backward(
            grad, x, dropped, weight, metadata, a, b, ratio, z, *ctx.which, wants_x
        )
        of_x = grad_x if wants_x else None
        of_dropped = None if dropped is None or not wants_x else grad_dropped
        return of_x, of_dropped, None, None, grad_a, grad_b, None, None


class _RatioGradient(torch.autograd.Function):
    """y unchanged, with a gradient for the ratio that y contains."""

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
    """`ratio * (x @ weight.T + scaling * (dropped @ a.T) @ b.T)`, computed in x's dtype.

    Args:
        x: `[..., in]`, bf16 or fp32.
        weight: `[out, in]`, frozen, quantized or plain of x's dtype.
        a, b: fp32 `[rank, in]` and `[out, rank]`.
        ratio: fp32 `[out]`, DoRA's magnitude / norm; None: ones.
        dropped: `[..., in]`, x after dropout; None: x itself.
        fp8: multiply by a quantized weight in FP8 (`qfsdp.tensor_subclasses.fp8`).

    Returns:
        `[..., out]` of x's dtype, with gradients for x, dropped, a, b and ratio.
    """
    metadata: Sequence[Tensor] = ()
    which = (scaling, "", 0, False)
    if isinstance(weight, QuantizedTensor):
        # Traced into a compiled layer, the check made it keep weights of norms for backward.
        if not torch.compiler.is_compiling():
            weight.check_product()
        which = (scaling, weight.format, weight.row_offset, fp8)
        metadata, weight = weight.metadata, weight.qdata
    y = _AdaptedLinear.apply(x, dropped, weight, metadata, a, b, ratio, which)
    return y if ratio is None else _RatioGradient.apply(y, ratio)
