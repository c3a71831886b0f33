"""The rows of a parameter on this rank, and all of its rows, sharded (a DTensor) or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# torch 2.13 renamed the function and warns about the old name.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
GATHER_NUMBERS = 1 << 24  # size of a group of matrices gathered at once: 64 MB in fp32


def local_part(param: Tensor) -> Tensor:
    """The rows of `param` that this rank holds; writing to the result writes to `param`."""
    return param.to_local() if isinstance(param, DTensor) else param.detach()


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank computes and runs collectives."""
    return (
        torch.device("cpu")
        if mesh.device_type == "cpu"
        else torch.device(mesh.device_type, torch.accelerator.current_device_index())
    )


def on_mesh(param: Tensor) -> Tensor:
    """`local_part` on the device where this rank computes; a copy if it is offloaded."""
    local = local_part(param)
    return local.to(mesh_device(param.device_mesh)) if isinstance(param, DTensor) else local


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that share the rows of a tensor: all of them, or this rank's group on a mesh of
    replicate x shard, where each group holds all rows."""
    return mesh.get_group(mesh.ndim - 1)


def whole_tensor(param: Tensor) -> Tensor:
    """All of `param` as a plain tensor without gradient. Collective: all its ranks must call it."""
    if not isinstance(param, DTensor):
        return param.detach()
    return gather_rows(param, on_mesh(param))


def whole_tensors(params: Sequence[Tensor]) -> Iterator[Tensor]:
    """`whole_tensor` of many small matrices, with one collective for each group of them.

    The 560 adapters of a 70B model would take 560 round trips one by one. `GATHER_NUMBERS` bounds
    the memory of a group. Either all are sharded by rows over the same mesh, or none is.
    """
    group: list[DTensor] = []
    for param in params:
        if not isinstance(param, DTensor):
            yield param.detach()
            continue
        group.append(param)
        if sum(p.numel() for p in group) >= GATHER_NUMBERS:
            yield from _gather(group, [*map(local_part, group)])
            group = []
    if group:
        yield from _gather(group, [*map(local_part, group)])


@torch.no_grad()
def _gather(params: Sequence[DTensor], own: Sequence[Tensor]) -> Iterator[Tensor]:
    """All rows of tensors that are sharded by rows as `params` are; `own` are those of this rank,
    of one dtype. Every rank sends as many rows as the first one has, so its last may be zeros."""
    mesh = params[0].device_mesh
    group = shard_group(mesh)
    rows = [-(-p.size(0) // group.size()) for p in params]
    sizes = [n * prod(mine.shape[1:]) for n, mine in zip(rows, own, strict=True)]
    sent = own[0].new_zeros(sum(sizes), device=mesh_device(mesh))
    for to, mine in zip(sent.split(sizes), own, strict=True):
        to[: mine.numel()].copy_(mine.flatten())
    everyone = sent.new_empty(group.size() * sent.numel())
    all_gather(everyone, sent, group)
    parts = everyone.view(group.size(), -1).split(sizes, dim=1)
    for part, n, param, mine in zip(parts, rows, params, own, strict=True):
        # Equal shards one after the other are the tensor with padding at its end.
        yield part.reshape(group.size() * n, *mine.shape[1:])[: param.size(0)]


def local_rows(param: Tensor) -> slice:
    """The rows of the whole tensor that this rank holds."""
    if not isinstance(param, DTensor):
        return slice(0, param.size(0))
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return slice(offset[0], offset[0] + shape[0])


def sharded(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The contiguous DTensor of `shape` made of the `local` part of every rank."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def gather_rows(param: Tensor, rows: Tensor) -> Tensor:
    """All rows of a tensor that is sharded by rows as `param` is. Collective.

    With gloo `DTensor.full_tensor` reads memory of a GPU as the host's (pytorch#152645).

    Args:
        param: only its sharding is used, not its values.
        rows: plain `[local rows of param, ...]`, the same sizes and dtype on all ranks.

    Returns:
        plain `[param.size(0), ...]` on every rank.
    """
    if not isinstance(param, DTensor):
        return rows
    return next(_gather([param], [rows]))
