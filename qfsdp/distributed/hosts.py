"""Values that the hosts of a run exchange: counts, settings, errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from qfsdp.common.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Hosts:
    """The base of `World`, which documents the fields. Every rank must call a method."""

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
