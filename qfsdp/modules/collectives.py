"""Collectives of ranks that share rows (`sharding.context_parallel`) or the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch 2.13 renamed the function and warns about the old name (`dtensor.all_gather`).
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
GROUPS: dict[str, dist.ProcessGroup] = {}
"""Groups by name: a custom op takes no group."""


class _OverParts(torch.autograd.Function):
    """The sum over a group. Each of its ranks uses the sum in its loss, so the gradient of a rank's
    own numbers is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group, y = GROUPS[group], x.clone()
        dist.all_reduce(y, group=ctx.group)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def over_parts(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over the ranks that share rows. Collective, and so is its backward."""
    y: Tensor = _OverParts.apply(x, group)
    return y
