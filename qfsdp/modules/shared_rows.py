"""Rows that ranks share: what recurrent layers exchange, tokens before a part and states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.data.cut_rows import CutRows
from qfsdp.modules.attention.cut_rows import Reach
from qfsdp.modules.collectives import GROUPS
from qfsdp.tensor_subclasses.dtensor import all_gather


class SharedRows(NamedTuple):
    """Rows that the ranks of a group share.

    Fields:
        rows: the rows, and which part of them this rank has.
        group: the ranks' name in `GROUPS`.
    """

    rows: CutRows
    group: str


def gathered(own: Tensor, shared: SharedRows) -> Tensor:
    """`own` of each rank of the group, `[parts, ...]`. Collective."""
    found = own.new_empty(shared.rows.parts, *own.shape)
    all_gather(found.flatten(0, 1), own.contiguous(), group=GROUPS[shared.group])
    return found


def with_tokens_before(values: Tensor, count: int, shared: SharedRows) -> tuple[Tensor, Tensor]:
    """`values` `[batch, own, channels]` behind those of at least `count` tokens before this part,
    as far as the row has them, and the numbers of their documents, int64 `[batch, more + own]`.
    Collective, and so is its backward."""
    found: Tensor = _TokensBefore.apply(values, count, shared)
    own = values.shape[1]
    return found, shared.rows.documents(own, found.shape[1] - own)


class _TokensBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, count: int, shared: SharedRows) -> Tensor:
        batch, own, _ = values.shape
        ctx.reach = Reach(batch, own, shared.rows.part, count, shared.group)
        (seen,) = ctx.reach.gather(values.flatten(0, 1).unsqueeze(1))()
        return seen.squeeze(1).unflatten(0, (batch, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (own,) = ctx.reach.scatter(grad.flatten(0, 1).unsqueeze(1))()
        return own.squeeze(1).unflatten(0, (len(grad), -1)), None, None
