"""A parameter's rows on this rank, whether it is sharded (a DTensor) or not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(param: Tensor) -> Tensor:
    """The rows of `param` that this rank holds; writing to the result writes to `param`."""
    return param.to_local() if isinstance(param, DTensor) else param.detach()


def whole_tensor(param: Tensor) -> Tensor:
    """All of `param`, plain and without gradient; every rank that holds a part must call it."""
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def local_rows(param: Tensor) -> slice:
    """Which rows of the whole those are."""
    if not isinstance(param, DTensor):
        return slice(0, param.size(0))
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return slice(offset[0], offset[0] + shape[0])


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
    shape = torch.Size((param.size(0), rows.size(1)))
    return DTensor.from_local(
        rows, param.device_mesh, param.placements, shape=shape, stride=(rows.size(1), 1)
    ).full_tensor()
