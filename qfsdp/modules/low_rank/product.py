"""A frozen linear and its low-rank product as one operation, with gradients written out.

    y = ratio * (W x + scaling * B A x)          ratio[i] per output row; all ones without DoRA

The dequantize kernel and B take `ratio` in, as it multiplies rows of W and B. So DoRA needs no pass
over activations in forward. y is linear in ratio, so the gradient of ratio needs no product:

    d loss / d ratio[i] = sum over tokens of grad[t, i] * y[t, i] / ratio[i]

Linears with one input (queries, keys and values; gate and up) are one operation. It takes 1 + 4 n
launches of a GPU for n of them and 5 + 6 n backward, if A and B are ready (`copies`).

Most consumers of y keep it anyway. The products with W and B are added in place, and so are their
gradients for x: the sum is rounded once and needs no separate pass over the output (235 MB for
8,192 tokens of an 8B model's feed-forward). Custom ops: see `quantized_linear` for the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.modules.low_rank import shapes
from qfsdp.tensor_subclasses.fp8 import backward_product, forward_product
from qfsdp.tensor_subclasses.frozen_weight import bytes_of, frozen_weight
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op


@custom_op("qfsdp::adapted_linear")
def forward_op(
    x: Tensor,
    z: Tensor,
    weights: Sequence[Tensor],
    metadata: Sequence[Tensor],
    b: Sequence[Tensor],
    ratios: Sequence[Tensor],
    scaling: float,
    format: str,
    row_offset: int,
    fp8: bool,
    ready: bool,
) -> list[Tensor]:
    """The outputs of linears with one input; z = x A^T of all of them.

    `ready`: each b is scaled and has x's dtype. Else they are the fp32 parameters.
    """
    dtype, flat, outputs = x.dtype, x.flatten(0, -2), []
    for at, (of_linear, own_z) in enumerate(zip(b, z.split(b[0].size(1), dim=1), strict=True)):
        ratio, of_weight = ratios[at] if ratios else None, _of(metadata, at, len(b))
        scaled = of_linear if ready else scaled_b(of_linear, ratio, scaling, dtype)
        if fp8:
            y = forward_product(flat, weights[at], of_weight, format, row_offset, ratio)
            y.addmm_(own_z, scaled.t())
        else:
            y = own_z @ scaled.t()
            which = (format, x.size(-1), row_offset, dtype, ratio)
            y.addmm_(flat, frozen_weight(weights[at], of_weight, *which).t())
        outputs.append(y.view(*x.shape[:-1], -1))
    return outputs


@custom_op("qfsdp::adapted_linear_backward")
def backward_op(
    grads: Sequence[Tensor],
    x: Tensor,
    dropped: Tensor | None,
    weights: Sequence[Tensor],
    metadata: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    ratios: Sequence[Tensor],
    z: Tensor,
    scaling: float,
    format: str,
    row_offset: int,
    fp8: bool,
    ready: bool,
    wants_x: bool,
) -> list[Tensor]:
    """Gradients of x, dropped, and the A and B of all linears below each other, fp32; empty tensors
    for those that do not exist."""
    dtype, rank, count = x.dtype, b[0].size(1), len(b)
    flat = [grad.flatten(0, -2) for grad in grads]
    each: Sequence[Tensor | None] = ratios or [None] * count
    scaled = b if ready else [scaled_b(*of, scaling, dtype) for of in zip(b, each, strict=True)]
    grad_z, sizes = torch.empty_like(z), [g.size(1) for g in flat]
    product = z.new_empty(sum(sizes), rank)
    parts = (flat, scaled, z.split(rank, 1), grad_z.split(rank, 1), product.split(sizes))
    for g, of_linear, own_z, into_z, into_b in zip(*parts, strict=True):
        torch.mm(g, of_linear, out=into_z)
        torch.mm(g.t(), own_z, out=into_b)
    # Two empty tensors: outputs of a custom op must be different tensors.
    grad_x, grad_dropped = (x.new_empty(0) for _ in range(2))
    if wants_x:
        through_a = grad_z @ _stacked(a, dtype)
        into = through_a if dropped is None else torch.zeros_like(through_a)
        for at, g in enumerate(flat):
            ratio, of_weight = ratios[at] if ratios else None, _of(metadata, at, count)
            if fp8:
                rows = (format, x.size(-1), row_offset, ratio)
                into += backward_product(g, weights[at], of_weight, *rows)
            else:
                which = (format, x.size(-1), row_offset, dtype, ratio)
                into.addmm_(g, frozen_weight(weights[at], of_weight, *which))
        grad_x = into.view_as(x)
        grad_dropped = grad_dropped if dropped is None else through_a.view_as(x)
    grad_a = (grad_z.t() @ (x if dropped is None else dropped).flatten(0, -2)).float()
    return [grad_x, grad_dropped, grad_a, _scaled_rows(product, ratios, scaling)]


def _stacked(a: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (a[0] if len(a) == 1 else torch.cat(list(a))).to(dtype)


def _of(metadata: Sequence[Tensor], at: int, count: int) -> Sequence[Tensor]:
    """The metadata of one of `count` weights."""
    each = len(metadata) // count
    return metadata[at * each : (at + 1) * each]


def _scaled_rows(product: Tensor, ratios: Sequence[Tensor], scaling: float) -> Tensor:
    """scaling * ratio * rows, in fp32."""
    if not ratios:
        return product.float().mul_(scaling)
    ratio = ratios[0] if len(ratios) == 1 else torch.cat(list(ratios))
    # An fp32 matrix of one column makes the product fp32 in one pass.
    return product * (ratio * scaling).unsqueeze(1)


def scaled_b(b: Tensor, ratio: Tensor | None, scaling: float, dtype: torch.dtype) -> Tensor:
    """scaling * ratio * B, multiplied in fp32 and rounded once."""
    b = b * scaling
    return (b if ratio is None else b * ratio.unsqueeze(1)).to(dtype)


torch.library.register_fake("qfsdp::adapted_linear", shapes.of_outputs)
torch.library.register_fake("qfsdp::adapted_linear_backward", shapes.of_gradients)


# ---- autograd: what is kept for backward, and whose gradient is which ----------------------------


class _Gradients(torch.autograd.Function):
    """Stand-ins for the outputs of one to three linears with one input, with gradients for x,
    dropped, and every a and b, each an argument: Dynamo miscounts a variable number of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        z: Tensor,
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
        ctx.sizes = [len(tensors) for tensors in given]
        ctx.save_for_backward(x, dropped, z, *(tensor for tensors in given for tensor in tensors))
        return tuple(stand_in(x, of_linear.size(0)) for of_linear in b)

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
        return of_x, of_dropped, None, None, None, None, None, None, *factors


def stand_in(x: Tensor, rows: int) -> Tensor:
    """`[..., rows]` without numbers: the result of a node of autograd that keeps what backward
    needs. The product runs in a node after it.

    A checkpointed layer is computed again up to the last tensor that was kept. So it leaves out a
    product at its end, a quarter of Llama 3's weights, unless DoRA keeps the result.
    """
    return x.new_empty_strided((*x.shape[:-1], rows), (0,) * x.dim())


class _Outputs(torch.autograd.Function):
    """The outputs. Their gradients go to the stand-ins y0 to y2. DoRA's magnitudes m0 to m2, which
    the outputs contain as factors of rows, get gradients too."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, z: Any, given: Any, y0: Any, y1: Any, y2: Any, m0: Any, m1: Any, m2: Any
    ) -> tuple[Tensor, ...]:
        outputs = forward_op(x, z, *given)
        if m0 is not None:
            ctx.save_for_backward(*outputs, *(m for m in (m0, m1, m2) if m is not None))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        each = zip(grads, saved, saved[len(grads) :], strict=False)
        of_m = [column_dots(g.flatten(0, -2), y.flatten(0, -2)) / m for g, y, m in each]
        return None, None, None, *_three(grads), *_three(of_m)


def _three(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*tensors, *[None] * (MOST_TOGETHER - len(tensors))]


def column_dots(g: Tensor, y: Tensor) -> Tensor:
    """The inner products of columns: `[tokens, n]` twice -> fp32 `[n]`."""
    # Plain in a compiled layer: fused there into passes over y and its gradient.
    dots = _column_dots if torch.compiler.is_compiling() else _compiled_column_dots
    return dots(g, y)


def _column_dots(g: Tensor, y: Tensor) -> Tensor:
    return (g.float() * y.float()).sum(0)


_compiled_column_dots = compiled(_column_dots)


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
    magnitudes: Sequence[Tensor] = (),
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
        magnitudes: fp32 `[out]`, factors of the ratios, which get gradients.
        dropped: `[..., in]`, x after dropout; None: x itself.
        fp8: multiply by quantized weights in FP8 (`qfsdp.tensor_subclasses.fp8`).
        ready: what is multiplied in place of a, b and ratios; they only get gradients then.

    Returns:
        `[..., out]` each, of x's dtype, with gradients for x, dropped, a, b and magnitudes.
    """
    metadata: list[Tensor] = []
    plain: list[Tensor] = []
    which = (scaling, "", 0, False)
    for weight in weights:
        held, of_weight, format, first = bytes_of(weight)
        which = (scaling, format, first, fp8 and bool(format))
        metadata += of_weight
        plain.append(held)
    held_a, held_b = a, b
    if ready is not None:
        held_a, held_b, ratios = [ready.a], ready.b, ready.ratios
    factors: list[Tensor | None] = [f for pair in zip(a, b, strict=True) for f in pair]
    factors += [None] * (2 * MOST_TOGETHER - len(factors))
    with torch.no_grad():
        z = (x if dropped is None else dropped).flatten(0, -2) @ _stacked(held_a, x.dtype).t()
    stand_ins = _Gradients.apply(x, dropped, z, plain, metadata, ready, ratios, which, *factors)
    of_op = (plain, metadata, held_b, ratios, *which, ready is not None)
    return list(_Outputs.apply(x.detach(), z, of_op, *_three(stand_ins), *_three(magnitudes)))
