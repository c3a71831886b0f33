"""The product of rows that are sorted by expert with the stacked weights of the experts.

Forward and backward are custom ops, as in `quantized_linear`. A quantized weight is dequantized
for some experts at a time, and again in backward: autograd keeps its bytes.

On GPUs `grouped_mm` multiplies the rows of all experts at once. Where each expert's rows end stays
on the device, and the host waits for nothing, as long as the dequantized experts fit in one chunk
(`quantization.expert_chunk`). Of several chunks the host must know the rows, and waits for them.
Elsewhere (CPUs, fp32, fp16, odd sizes) it is a loop over the experts that have rows. So it is for
few rows, as in generation: of 128 experts a token needs 8, and the others are not dequantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.tensor_subclasses.frozen_weight import bytes_of, frozen_weight
from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.tensor_subclasses.kernels.compiled import on_cpu
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op

CHUNK_BYTES = 1 << 30  # of dequantized experts; Qwen3-30B-A3B has 805 MB in a projection of a layer


def takes_grouped(x: Tensor, experts: int, *sizes: int) -> bool:
    """Whether `grouped_mm` is fast for rows `x` and experts of these sizes: bf16 on a GPU since
    Ampere, and rows of a multiple of 16 bytes."""
    if x.dtype != torch.bfloat16 or x.size(0) < experts or any(size % 8 for size in sizes):
        return False
    if dry_run.current is not None:
        return not on_cpu(x)
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


def slices(ends: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of every expert that has some of all `rows`. Waits for the device.

    In a dry run nobody knows the rows: one expert gets an even share, and stands for all, as each
    returns its memory before the next.
    """
    if dry_run.current is not None:
        yield 0, slice(0, -(-rows // ends.numel()))
        return
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def expert_product(
    x: Tensor,
    ends: Tensor,
    weight: Tensor,
    metadata: Sequence[Tensor],
    cols: int,
    format: str = "",
    row_offset: int = 0,
    row_scale: Tensor | None = None,
    transposed: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """`x[i] @ W[e].T` of each row i and its expert e; with `transposed`, `x[i] @ W[e]`.

    Args:
        x: `[rows, cols]`, or `[rows, out]` with `transposed`, sorted by expert.
        ends: int32 `[experts]`, where each expert's rows end.
        weight, metadata, format, row_offset: `[experts * out, cols]`, as in `frozen_weight`.
        row_scale: fp32 `[experts * out]`, multiplies the rows of W; None: ones.
        chunk_bytes: of dequantized experts at a time, at least one expert.
    """
    experts, size = ends.numel(), weight.size(0) // ends.numel()

    def weights(first: int, last: int) -> Tensor:
        """Of experts `first` to `last`: `[experts, in, out]` of the product."""
        rows = slice(first * size, last * size)
        scale = None if row_scale is None else row_scale[rows]
        offset = row_offset + rows.start
        w = frozen_weight(weight[rows], metadata, format, cols, offset, x.dtype, scale)
        w = w.view(last - first, size, cols)
        return w if transposed else w.transpose(1, 2)

    out = cols if transposed else size
    if takes_grouped(x, experts, size, cols):
        made = bool(format) or row_scale is not None or weight.dtype != x.dtype
        of_chunk = chunk_bytes // (size * cols * x.element_size()) if made else experts
        return _grouped(x, ends, out, max(of_chunk, 1), weights)
    y = x.new_empty(x.size(0), out)
    for expert, rows in slices(ends, x.size(0)):
        torch.mm(x[rows], weights(expert, expert + 1)[0], out=y[rows])
    return y


def _grouped(x: Tensor, ends: Tensor, out: int, of_chunk: int, weights: Any) -> Tensor:
    """The product, for `of_chunk` experts at a time."""
    experts = ends.numel()
    if of_chunk >= experts:
        return F.grouped_mm(x, weights(0, experts), offs=ends)
    firsts = range(0, experts, of_chunk)
    lasts = [min(first + of_chunk, experts) for first in firsts]
    y, start = x.new_empty(x.size(0), out), 0
    if dry_run.current is None:
        bounds = ends[[last - 1 for last in lasts]].tolist()
    else:
        bounds = [x.size(0) * last // experts for last in lasts]
    for first, last, end in zip(firsts, lasts, bounds, strict=True):
        if end > start:
            of_rows = ends[first:last] - start
            y[start:end] = F.grouped_mm(x[start:end], weights(first, last), offs=of_rows)
        start = end
    return y


def weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """`grad[rows].T @ x[rows]` of every expert's rows, `[experts * out, in]`; 0 without rows."""
    if takes_grouped(x, ends.numel(), grad.size(1), x.size(1)):
        weight = F.grouped_mm(grad.t(), x, offs=ends)
        none = torch.diff(ends, prepend=ends.new_zeros(1)) == 0  # their products are not computed
        return weight.masked_fill_(none.view(-1, 1, 1), 0).flatten(0, 1)
    weight = x.new_zeros(ends.numel(), grad.size(1), x.size(1))
    for expert, rows in slices(ends, x.size(0)):
        torch.mm(grad[rows].t(), x[rows], out=weight[expert])
    return weight.flatten(0, 1)


@custom_op("qfsdp::expert_linear")
def _expert_linear(
    x: Tensor,
    ends: Tensor,
    weight: Tensor,
    metadata: Sequence[Tensor],
    format: str,
    cols: int,
    row_offset: int,
    chunk: int,
) -> Tensor:
    return expert_product(x, ends, weight, metadata, cols, format, row_offset, chunk_bytes=chunk)


@custom_op("qfsdp::expert_linear_backward")
def _expert_linear_backward(
    grad: Tensor,
    ends: Tensor,
    weight: Tensor,
    metadata: Sequence[Tensor],
    format: str,
    cols: int,
    row_offset: int,
    chunk: int,
) -> Tensor:
    return expert_product(
        grad, ends, weight, metadata, cols, format, row_offset, transposed=True, chunk_bytes=chunk
    )


@custom_op("qfsdp::expert_weight_gradient")
def _expert_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return weight_gradient(grad, x, ends)


@torch.library.register_fake("qfsdp::expert_linear")
def _(x: Tensor, ends: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // ends.numel())


@torch.library.register_fake("qfsdp::expert_linear_backward")
def _(grad: Tensor, ends: Any, weight: Any, metadata: Any, format: str, cols: int, *_: Any) -> Any:
    return grad.new_empty(grad.size(0), cols)


@torch.library.register_fake("qfsdp::expert_weight_gradient")
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.numel() * grad.size(1), x.size(1))


class _ExpertProduct(torch.autograd.Function):
    """The product with a weight given as its parts, with gradients of x and of a plain weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        weight: Tensor,
        metadata: Sequence[Tensor],
        which: tuple[str, int, int, int],  # format, cols, row_offset, chunk_bytes
    ) -> Tensor:
        ctx.which = which
        kept = x if ctx.needs_input_grad[2] else None  # only a trained weight needs the input
        ctx.save_for_backward(ends, weight, kept, *metadata)
        return _expert_linear(x, ends, weight, metadata, *which)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ends, weight, x, *metadata = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _expert_linear_backward(grad, ends, weight, metadata, *ctx.which)
        if x is not None:
            grad_weight = _expert_weight_gradient(grad, x, ends)
        return grad_x, None, grad_weight, None, None


def expert_linear(
    x: Tensor, weight: Tensor, ends: Tensor, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """`y[i] = x[i] @ W[e].T`, where e is the expert of row i.

    Args:
        x: `[rows, in]`, sorted by expert.
        weight: `[experts * out, in]`: plain, with a gradient if it is trained, or a
            `QuantizedTensor`, of which autograd keeps the bytes alone.
        ends: int32 `[experts]`, where each expert's rows end.
        chunk_bytes: as in `expert_product`.

    Returns:
        `[rows, out]` of x's dtype.

    Raises:
        ValueError: a quantized `weight` is flat, holds no weights yet, or requires a gradient.
    """
    held, metadata, format, first = bytes_of(weight)
    which = (format, weight.size(-1), first, chunk_bytes)
    return _ExpertProduct.apply(x, ends, held, metadata, which)
