"""Row norms of W + scaling * B A where experts are stacked: A is the one of the row's expert.

`low_rank.linear` has the norms of other linears.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfsdp.modules.experts.product import expert_product
from qfsdp.modules.low_rank.linear import roots
from qfsdp.tensor_subclasses.frozen_weight import row_chunks
from qfsdp.tensor_subclasses.kernels.compiled import compiled


@compiled
def _expert_norms(mixed: Tensor, grams: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
    """`low_rank.linear._norms` where each row has its own A A^T, fp32 `[rows, rank, rank]`."""
    crossed = (b.unsqueeze(2) * grams).sum(1)
    return roots(base_squares + ((2 * mixed.float() + crossed) * b).sum(1))


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
