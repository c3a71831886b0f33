"""`World`: this rank and its device, and values exchanged with the other processes of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from qfsdp.common.devices import sum_dtype
from qfsdp.distributed.hosts import Hosts


@dataclass(frozen=True)
class World(Hosts):
    """This process and its place among the others.

    Fields:
        device: where this rank computes.
        rank: 0 .. size - 1. Rank 0 writes files and prints.
        size: number of processes.
        mesh: 1-D device mesh of all processes; None if FSDP2 is not used.
        local_size: number of processes on this machine.
        timeout: the limit of one collective; None: PyTorch's.
        hosts: the group of all ranks over gloo, for numbers of the host: over NCCL the host would
            copy them to the device, and wait for all that the device has to do. None: the default
            group, which is gloo's.
    """

    def total(self, value: float) -> torch.Tensor:
        """The sum of `value` over all ranks, fp32 `[]` on the device; the host does not wait."""
        total = torch.full((), value, dtype=sum_dtype(self.device), device=self.device)
        return self.sum_of(total).float()

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values
