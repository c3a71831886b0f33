"""Gradients over all ranks: clipping by their global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qfsdp.tensor_subclasses.dtensor import local_part, mesh_device, shard_group

# Attribute of a parameter whose gradient was used in backward: its norm on this rank, fp32.
USED_GRAD_NORM = "_used_grad_norm"


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer updates, in model order."""
    return [p for p in model.parameters() if p.requires_grad]


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales the gradients in place so that their global L2 norm is at most `max_norm`.

    Args:
        max_norm: None clips nothing.

    Returns:
        The norm before clipping, over all parameters of all ranks, fp32 `[]`. It is a tensor, so
        the host does not wait for it. A gradient that was used in backward counts with the norm
        that it left (`USED_GRAD_NORM`).
    """
    parameters = list(parameters)
    # On local rows: the same operations on DTensors took 2 to 5 times as long (420 adapters).
    rows = [local_part(param.grad) for param in parameters if param.grad is not None]
    norms = list(torch._foreach_norm(rows, 2, torch.float32)) if rows else []
    for param in parameters:
        if (used := getattr(param, USED_GRAD_NORM, None)) is not None:
            norms.append(used)
            delattr(param, USED_GRAD_NORM)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if sharded := [param for param in parameters if isinstance(param, DTensor)]:
        norm = norm.square()
        mesh = sharded[0].device_mesh
        norm = norm.to(mesh_device(mesh))
        dist.all_reduce(norm, group=shard_group(mesh))
        norm = norm.sqrt()
    if max_norm is not None:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(rows, scale.to(rows[0].device) if rows else scale)
    return norm
