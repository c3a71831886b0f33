"""Parameters of which a rank keeps its own rows, as DTensors that FSDP2 does not know.

For a vocabulary that ranks split (`qfsdp.distributed.split_vocabulary`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, sharded, whole_tensor


def own_parameter(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's rows of a parameter on the meta device."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    each = -(-param.size(0) // mesh.size(mesh.ndim - 1))
    first = mesh.get_local_rank(mesh.ndim - 1) * each
    rows = param.detach()[min(first, param.size(0)) : first + each]
    whole = sharded(rows, mesh, placements, param.shape)
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def own_rows(param: Tensor) -> Tensor:
    """This rank's rows of a parameter, with its gradient."""
    recorded = param.requires_grad and torch.is_grad_enabled()
    return cast(Tensor, _OwnRows.apply(param)) if recorded else local_part(param)


def all_rows(param: Tensor) -> Tensor:
    """All rows of a parameter, with its gradient."""
    return cast(Tensor, _Whole.apply(param))


class _OwnRows(torch.autograd.Function):
    """A DTensor -> this rank's rows. Their gradient is summed over the replicas of a hybrid mesh,
    fp32 `[rows, ...]`; over the ranks that share the rows it is summed already."""

    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.like = param.device_mesh, param.placements, param.shape
        return param.to_local().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        mesh, placements, shape = ctx.like
        if mesh.ndim > 1:
            dist.all_reduce(grad := grad.contiguous(), group=mesh.get_group(0))
        return sharded(grad, mesh, placements, shape)


class _Whole(torch.autograd.Function):
    """A DTensor -> all of its rows, on every rank, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.param = param
        return whole_tensor(param)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        dist.all_reduce(grad := grad.contiguous())
        like = ctx.param
        return sharded(grad[local_rows(like)], like.device_mesh, like.placements, like.shape)
