"""Row norms of W + scaling * B A without the product B A, for this rank's rows.

    |w + s b A|^2 = |w|^2 + (2 s w A^T + s^2 b A A^T) . b

W is read in pieces, as the plain rows that forward multiplies by. With experts stacked in W and B,
A is the one of the row's expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qfsdp.modules.experts.product import expert_product
from qfsdp.tensor_subclasses.dtensor import local_rows
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.kernels.dry_run import on_cpu
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor, frozen_weight

# Weights at a time in `refresh_dora_norms`: 8 MB in bf16 stay in a CPU's cache. On a GPU 128 MB:
# pieces that fit its cache take longer, even as one graph. All linears of an 8B model on an H200,
# as a graph: 10.2 ms; in pieces of 16, 32 and 64 MB 14.4, 11.9 and 11.2 ms.
NORM_CHUNK_WEIGHTS, NORM_CHUNK_ON_GPU = 1 << 22, 1 << 26


def held_rows(weight: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """The rows of a frozen weight that match this rank's rows of `like`, on `device`. Fewer than
    the rank holds if the base is replicated and the adapters are sharded."""
    if not isinstance(weight, DTensor):
        whole = weight.detach()
        return whole[local_rows(like)] if isinstance(like, DTensor) else whole
    held = weight.to_local()
    if isinstance(held, QuantizedTensor):
        held = held.fetch()
    return held.to(device)


def row_chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields a frozen weight in pieces, as the plain rows that forward multiplies by."""
    chunk = NORM_CHUNK_WEIGHTS if on_cpu(weight) else NORM_CHUNK_ON_GPU
    step = max(1, chunk // weight.size(1))
    for start in range(0, weight.size(0), step):
        part = slice(start, min(start + step, weight.size(0)))
        rows = weight[part] if step < weight.size(0) else weight
        if isinstance(rows, QuantizedTensor):
            which = (rows.format, rows.cols, rows.row_offset, rows.dtype)
            rows = frozen_weight(rows.qdata, rows.metadata, *which)
        yield part, rows


def squared_norms(weight: Tensor) -> Tensor:
    """fp32 `[rows]`, the squared norm of each row."""
    squares = torch.empty(weight.size(0), dtype=torch.float32, device=weight.device)
    for part, rows in row_chunks(weight):
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, out=squares[part])
    return squares.square_()


def adapted_norms(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, base_squares: Tensor
) -> Tensor:
    """fp32 `[rows]`, the row norms of W + scaling * B A."""
    mixed = torch.empty_like(b, dtype=weight.dtype)  # W A^T, `[rows, rank]`
    a = a.to(mixed.dtype)
    for part, rows in row_chunks(weight):
        torch.mm(rows, a.t(), out=mixed[part])
    return _norms(mixed, a, b * scaling, base_squares)


@compiled
def _norms(mixed: Tensor, a: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
    """Row norms, without the product B A. `mixed` is w A^T of rows w, `base_squares` their squared
    norms; b is scaled."""
    gram = a.float() @ a.t().float()
    return roots(base_squares + ((2 * mixed.float() + b @ gram) * b).sum(1))


@compiled
def _expert_norms(mixed: Tensor, grams: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
    """`_norms` where each row has its own A A^T, fp32 `[rows, rank, rank]`."""
    crossed = (b.unsqueeze(2) * grams).sum(1)
    return roots(base_squares + ((2 * mixed.float() + crossed) * b).sum(1))


def roots(squares: Tensor) -> Tensor:
    """Row norms, fp32 `[rows]`, from their squares."""
    # In a row of zeros (an unused vocabulary entry) magnitude and norm are equal: their ratio is 1.
    return squares.clamp(min=0.0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)


def adapted_expert_norms(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, base_squares: Tensor, ends: Tensor
) -> Tensor:
    """fp32 `[rows]`, the row norms of W[e] + scaling * B[e] A[e].

    Args:
        weight, b: the same rows of the stacked experts; `b` fp32 `[rows, rank]`.
        a: fp32 `[experts * rank, in]`, of all experts.
        base_squares: fp32 `[rows]`, the squared norms of the rows of `weight`.
        ends: int32 `[experts]`, where the rows of each expert end in `weight`. Those of experts
            that lie before are at most 0.
    """
    norms, a = torch.empty_like(base_squares), a.to(weight.dtype)
    experts = a.float().view(ends.numel(), -1, a.size(1))
    grams = experts @ experts.mT
    for part, rows in row_chunks(weight):
        ends_here = (ends - part.start).clamp(0, rows.size(0))
        mixed = expert_product(rows, ends_here, a, (), rows.size(1))
        at = torch.arange(rows.size(0), device=ends.device, dtype=ends.dtype)
        of_rows = grams[torch.searchsorted(ends_here, at, right=True)]
        norms[part] = _expert_norms(mixed, of_rows, b[part] * scaling, base_squares[part])
    return norms
