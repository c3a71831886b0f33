"""The processes of a run: this one's rank and device, and values exchanged with the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from qfsdp.common.devices import accelerator, sum_dtype
from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import long_wait
from qfsdp.distributed.strategy import ShardingConfig, mesh_shape, needs_fsdp
from qfsdp.launch.watchdog import DistributedConfig

T = TypeVar("T")


@dataclass(frozen=True)
class World:
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

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    local_size: int = 1
    timeout: timedelta | None = None
    hosts: dist.ProcessGroup | None = None

    def exchange(self, *values: float) -> list[list[float]]:
        """Each value as every rank has it, by rank (in fp64), in one collective of the hosts."""
        if self.mesh is None:
            return [[value] for value in values]
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.hosts)
        return torch.stack(everyone, 1).tolist()

    def sum(self, value: float) -> float:
        """The sum of `value` over all ranks (in fp64)."""
        return self.sums(value)[0]

    def sums(self, *values: float) -> list[float]:
        """The sum of each value over all ranks (in fp64), in one all-reduce of the hosts."""
        if self.mesh is None:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals, group=self.hosts)
        return totals.tolist()

    def total(self, value: float) -> torch.Tensor:
        """The sum of `value` over all ranks, fp32 `[]` on the device; the host does not wait."""
        total = torch.full((), value, dtype=sum_dtype(self.device), device=self.device)
        return self.sum_of(total).float()

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def max(self, value: float) -> float:
        """The largest `value` of any rank (in fp64)."""
        return max(self.exchange(value)[0])

    def broadcast(self, value: T) -> T:
        """The `value` of rank 0, on every rank; any picklable object."""
        if self.mesh is None:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0, group=self.hosts)
        return holder[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, by rank; any picklable object."""
        if self.mesh is None:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.hosts)
        return values

    @contextmanager
    def same_error(self) -> Iterator[None]:
        """A part that every rank does: a UserError of one rank is raised on every rank.

        Without it the others would wait in their next collective for the one that failed.
        """
        failed = None
        try:
            yield
        except UserError as error:
            failed = str(error)
        for text in self.gather(failed):
            if text is not None:
                raise UserError(text)


class Numbers(Protocol):
    """Numbers of the host that all ranks need: they join the exchange of another part."""

    def numbers(self) -> list[float]:
        """Those of this rank; every rank has as many."""

    def take(self, of_ranks: list[list[float]]) -> None:
        """Gets each as every rank has it, as `World.exchange` returns them."""


@long_wait("distributed: waiting for all ranks")
def init_world(
    sharding: ShardingConfig | None = None,
    distributed: DistributedConfig | None = None,
    casts: bool = False,
) -> World:
    """Joins the processes that torchrun started (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`).

    Uses the accelerator with index `LOCAL_RANK`, or the CPU if the machine has none. A single
    process gets no process group and no mesh unless FSDP2 is needed (`needs_fsdp`).

    Args:
        distributed: gives every group its limit of a collective.
        casts: trained weights are held in another dtype than they are computed in.

    Raises:
        UserError: this machine has fewer accelerators than processes, the environment has only
            some of torchrun's variables, or `sharding.replicate` and `sharding.shard` do not give
            the number of processes.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    rank = int(os.environ.get("RANK", 0))
    if sharding is not None:
        mesh_shape(sharding, size, local_size)
    device = torch.device("cpu")
    if (kind := accelerator()) is not None:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= (count := torch.accelerator.device_count()):
            raise UserError(f"--nproc_per_node: rank {rank} needs one of {count} accelerators here")
        torch.accelerator.set_device_index(local_rank)
        device = torch.device(kind.type, local_rank)
    if not needs_fsdp(sharding or ShardingConfig(), size, casts):
        return World(device)
    timeout = (distributed or DistributedConfig()).for_collectives
    if not dist.is_initialized():
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
        if size > 1 and (missing := [name for name in needed if name not in os.environ]):
            given = f"WORLD_SIZE: {size} in the environment, without {', '.join(missing)}"
            raise UserError(f"{given}; expected all that torchrun sets, or `unset WORLD_SIZE`")
        # With an explicit device NCCL connects now, not in the first collective.
        options: dict[str, Any] = {"device_id": device if device.type != "cpu" else None}
        options["timeout"] = timeout
        if size == 1:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(**options)
    mesh = init_device_mesh(device.type, (size,))
    hosts = None
    if device.type != "cpu":
        hosts = dist.new_group(backend="gloo", timeout=timeout)
    return World(device, rank, size, mesh, local_size, timeout, hosts)
