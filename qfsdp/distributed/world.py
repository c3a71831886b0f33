"""The processes of a run: how they find each other; `World` is what they know then."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from qfsdp.common.devices import accelerator
from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import long_wait
from qfsdp.distributed.exchange import World as World
from qfsdp.distributed.strategy import ShardingConfig as ShardingConfig
from qfsdp.distributed.strategy import mesh_shape, needs_fsdp
from qfsdp.launch.nodes import check_master, used_port, wait_for_name
from qfsdp.launch.watchdog import DistributedConfig as DistributedConfig


class Numbers(Protocol):
    """Numbers of the host that all ranks need: they join the exchange of another part."""

    def numbers(self) -> list[float]:
        """Those of this rank; every rank has as many."""

    def take(self, of_ranks: list[list[float]]) -> None:
        """Gets each as every rank has it, as `World.exchange` returns them."""


def new_mesh(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks as a grid; its groups have the run's limit of a collective, not PyTorch's."""
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    if world.timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(world.timeout, group)
    return mesh


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
            some of torchrun's variables, `MASTER_PORT` is no port or in use, `MASTER_ADDR` is a
            name that no machine has, or `sharding.replicate` and `sharding.shard` do not give the
            number of processes.
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
        if size > 1:
            check_master()
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            wait_for_name("MASTER_ADDR", place)
        # With an explicit device NCCL connects now, not in the first collective.
        options: dict[str, Any] = {"device_id": device if device.type != "cpu" else None}
        options["timeout"] = timeout
        if size == 1:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        try:
            dist.init_process_group(**options)
        except dist.DistNetworkError as error:
            used = used_port(error, "MASTER_PORT")
            if used is None or dist.is_torchelastic_launched():  # whose ranks may start again
                raise
            raise used from None
    mesh = init_device_mesh(device.type, (size,))
    hosts = None
    if device.type != "cpu":
        hosts = dist.new_group(backend="gloo", timeout=timeout)
    return World(device, rank, size, mesh, local_size, timeout, hosts)
