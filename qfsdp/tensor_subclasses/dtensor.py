"""A parameter's rows on this rank, whether it is sharded (a DTensor) or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Its name from torch 2.13 on, which warns of the other.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
GATHER_NUMBERS = 1 << 24  # of a group of matrices that is gathered at once: 64 MB in fp32


def local_part(param: Tensor) -> Tensor:
    """The rows of `param` that this rank holds; writing to the result writes to `param`."""
    return param.to_local() if isinstance(param, DTensor) else param.detach()


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes, and its collectives work."""
    return (
        torch.device("cpu")
        if mesh.device_type == "cpu"
        else torch.device(mesh.device_type, torch.accelerator.current_device_index())
    )


def on_mesh(param: Tensor) -> Tensor:
    """`local_part` on the device where this rank computes; a copy where it is offloaded."""
    local = local_part(param)
    return local.to(mesh_device(param.device_mesh)) if isinstance(param, DTensor) else local


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that have the rows of a tensor among them: all, or those of this one's group
    where several groups hold the same (a mesh of replicate x shard)."""
    return mesh.get_group(mesh.ndim - 1)


def whole_tensor(param: Tensor) -> Tensor:
    """All of `param`, plain and without gradient; every rank that holds a part must call it."""
    if not isinstance(param, DTensor):
        return param.detach()
    rows = sharded(on_mesh(param), param.device_mesh, param.placements, param.shape)
    return rows.full_tensor()


def whole_tensors(params: Sequence[Tensor]) -> Iterator[Tensor]:
    """`whole_tensor` of many small matrices, in groups of one collective each.

    560 of a 70B model's adapters one by one cost 560 round trips; `GATHER_NUMBERS` bounds what a
    group takes. All must be sharded by rows over the same mesh, or none.
    """
    group: list[DTensor] = []
    for param in params:
        if not isinstance(param, DTensor):
            yield param.detach()
            continue
        group.append(param)
        if sum(p.numel() for p in group) >= GATHER_NUMBERS:
            yield from _gather(group)
            group = []
    if group:
        yield from _gather(group)


def _gather(params: Sequence[DTensor]) -> Iterator[Tensor]:
    """Every rank sends its rows of all of them, padded to those of the first rank."""
    mesh = params[0].device_mesh
    group = shard_group(mesh)
    rows = [-(-p.size(0) // group.size()) for p in params]
    sizes = [n * p.size(1) for n, p in zip(rows, params, strict=True)]
    mine = params[0].to_local().new_zeros(sum(sizes), device=mesh_device(mesh))
    for to, param in zip(mine.split(sizes), params, strict=True):
        local = param.to_local().detach()
        to[: local.numel()].copy_(local.flatten())
    everyone = mine.new_empty(group.size() * mine.numel())
    _all_gather(everyone, mine, group)
    parts = everyone.view(group.size(), -1).split(sizes, dim=1)
    for part, param in zip(parts, params, strict=True):
        # A view of equal shards is the matrix, padded at its end.
        yield part.reshape(-1, param.size(1))[: param.size(0)]


def local_rows(param: Tensor) -> slice:
    """Which rows of the whole those are."""
    if not isinstance(param, DTensor):
        return slice(0, param.size(0))
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return slice(offset[0], offset[0] + shape[0])


def sharded(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The contiguous tensor of `shape` of which every rank has its `local` part."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def gather_rows(param: Tensor, rows: Tensor) -> Tensor:
    """All rows of a matrix of which every rank has those that it holds of `param`.

    Args:
        param: says how rows are spread; its own values are not used.
        rows: plain `[local rows of param, n]`, the same n and dtype on all ranks.

    Returns:
        plain `[param.size(0), n]`, on every rank.
    """
    if not isinstance(param, DTensor):
        return rows
    shape = (param.size(0), rows.size(1))
    return sharded(rows, param.device_mesh, param.placements, shape).full_tensor()
