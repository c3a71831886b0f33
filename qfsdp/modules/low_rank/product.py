"""A frozen linear and its low-rank product as one operation, with gradients written out.

    y = ratio * (W x + scaling * B A x)          ratio[i] per output row; all ones without DoRA

The dequantize kernel and B take `ratio` in, as it multiplies rows of W and B. So DoRA needs no pass
over activations in forward. y is linear in ratio, so the gradient of ratio needs no product:

    d loss / d ratio[i] = sum over tokens of grad[t, i] * y[t, i] / ratio[i]

Linears with one input (queries, keys and values; gate and up) are one operation. It takes 1 + 4 n
launches of a GPU for n of them and 5 + 6 n backward, if A and B are ready (`same_input`).

Most consumers of y keep it anyway. The products with W and B are added in place, and so are their
gradients for x: the sum is rounded once and needs no separate pass over the output (235 MB for
8,192 tokens of an 8B model's feed-forward). Custom ops: see `quantized_linear` for the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.fp8 import backward_product, forward_product
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op
from qfsdp.tensor_subclasses.quantized_tensor import frozen_weight


@custom_op("qfsdp::adapted_linear")
def forward_op(
    x: Tensor,
    dropped: Tensor | None,
    weights: Sequence[Tensor],
    metadata: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    ratios: Sequence[Tensor],
    scaling: float,
    format: str,
    row_offset: int,
    fp8: bool,
    ready: bool,
) -> list[Tensor]:
    """The outputs of linears with one input, and z = x A^T of all of them.

    `ready`: `a` is one matrix, the A of all linears below each other, and each b is scaled; all of
    x's dtype. Else they are the fp32 parameters.
    """
    dtype, flat = x.dtype, x.flatten(0, -2)
    z = (flat if dropped is None else dropped.flatten(0, -2)) @ _stacked(a, dtype).t()
    outputs = []
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
    return [*outputs, z]


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
    scaled = (
        b
        if ready
        else [
            scaled_b(b[at], ratios[at] if ratios else None, scaling, dtype) for at in range(count)
        ]
    )
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


@torch.library.register_fake("qfsdp::adapted_linear")
def _(x: Tensor, dropped: Any, weights: Any, metadata: Any, a: Any, *_: Any) -> list[Tensor]:
    outputs = [x.new_empty(*x.shape[:-1], weight.size(0)) for weight in weights]
    return [*outputs, x.new_empty(x.shape[:-1].numel(), sum(factor.size(0) for factor in a))]


@torch.library.register_fake("qfsdp::adapted_linear_backward")
def _(
    grads: Any, x: Tensor, dropped: Any, weights: Any, metadata: Any, a: Any, b: Any, *rest: Any
) -> list[Tensor]:
    wants_x, rank = rest[-1], b[0].size(1)
    return [
        torch.empty_like(x) if wants_x else x.new_empty(0),
        torch.empty_like(x) if wants_x and dropped is not None else x.new_empty(0),
        x.new_empty(len(b) * rank, x.size(-1), dtype=torch.float32),
        x.new_empty(sum(factor.size(0) for factor in b), rank, dtype=torch.float32),
    ]
