"""Processes, devices and FSDP2: how a decoder is spread over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from qfsdp.errors import UserError
from qfsdp.modules.adapters import AdaptedLinear
from qfsdp.modules.packed_linear import PackedLinear
from qfsdp.modules.shards import local_part
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.packed import PackedTensor

T = TypeVar("T")


@dataclass
class ShardingConfig:
    """Section `sharding`: what is spread over the ranks, and in which units.

    Fields:
        strategy: "full_shard": parameters, gradients and optimizer state are spread over all
            ranks. "shard_grad_op": parameters are gathered for forward and kept until backward is
            through; faster, and as large as the model. "ddp": the frozen base whole on every rank;
            adapters, gradients and optimizer state spread. "hybrid_full_shard",
            "hybrid_shard_grad_op": as the first two within a group of ranks, and alike in all
            groups.
        replicate, shard: for hybrid strategies, the number of groups and of ranks in one. By
            default a machine is a group. Their product must be the number of ranks.
        wrap: the unit that is gathered at a time. "decoder_layer" overlaps communication
            with compute best; "linear" holds one linear at a time, for the least memory.
        prefetch: how many units ahead are gathered while one computes; each takes its memory.
        cpu_offload: parameters, gradients and optimizer state lie in host memory, and the
            optimizer runs there; a unit's parameters are on the device while it computes.
        offload_base: where the frozen weights of the linears lie: "none": on the device; "cpu": in
            host memory; "disk": in the files of a packed model folder.
        ring_memory: host memory for read-ahead with offload_base "disk", per rank.
    """

    strategy: Literal[
        "full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op"
    ] = "full_shard"
    replicate: int | None = None
    shard: int | None = None
    wrap: Literal["decoder_layer", "linear"] = "decoder_layer"
    prefetch: int = 1
    cpu_offload: bool = False
    offload_base: Literal["none", "cpu", "disk"] = "none"
    ring_memory: str = "4GiB"


@dataclass(frozen=True)
class World:
    """This process among the others.

    Fields:
        device: where this rank computes.
        rank: 0 .. size - 1. Rank 0 writes files and prints.
        size: number of processes.
        mesh: 1-D device mesh over all of them; None with one process.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    def sum(self, value: float) -> float:
        """The sum of `value` over all ranks (in fp64)."""
        if self.mesh is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def max(self, value: float) -> float:
        """The largest `value` of any rank (in fp64)."""
        if self.mesh is None:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def broadcast(self, value: T) -> T:
        """What rank 0 passes, on every rank; anything that can be pickled."""
        if self.mesh is None:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0, device=self.device)
        return holder[0]

    def gather(self, value: T) -> list[T]:
        """What every rank passes, by rank; anything that can be pickled."""
        if self.mesh is None:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values


def init_world() -> World:
    """Joins the processes that torchrun started (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`).

    Uses the accelerator `LOCAL_RANK` of this machine where there is one, else the CPU. A
    single process joins nothing and gets no mesh.

    Raises:
        UserError: this machine has fewer accelerators than processes.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= (count := torch.accelerator.device_count()):
            raise UserError(f"--nproc_per_node: rank {rank} needs one of {count} accelerators here")
        torch.accelerator.set_device_index(local_rank)
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        device = torch.device(kind.type, local_rank)
    if size == 1:
        return World(device)
    if not dist.is_initialized():
        # An explicit device lets NCCL connect at once, and not inside the first collective.
        dist.init_process_group(device_id=device if device.type != "cpu" else None)
    return World(device, rank, size, init_device_mesh(device.type, (size,)))


def shard_model(model: Decoder, config: ShardingConfig, world: World) -> None:
    """Shards every parameter of `model`, in place, by rows over the ranks (FSDP2).

    The units, each gathered as one: decoder layers (or their linears), the embeddings, and the
    output layer. Where the embeddings are also the output layer they belong to the root, as the
    last norm does, and stay gathered for the step. Nothing is cast while it is gathered: frozen
    weights are held in the compute dtype and adapters cast themselves, so that one rank and many
    run the same arithmetic.

    With a single process nothing is wrapped: FSDP2 would copy every parameter.
    """
    if world.mesh is None:
        return
    unit: dict[str, Any] = {
        "mesh": world.mesh,
        "reshard_after_forward": config.strategy in ("full_shard", "hybrid_full_shard"),
    }
    body = model.model
    for layer in body.layers:
        if config.wrap == "linear":
            for module in layer.modules():
                if isinstance(module, AdaptedLinear | PackedLinear | nn.Linear):
                    fully_shard(module, **unit)
        fully_shard(layer, **unit)
    if model.lm_head.weight is not body.embed_tokens.weight:
        fully_shard(body.embed_tokens, **unit)
        fully_shard(model.lm_head, mesh=world.mesh, reshard_after_forward=False)
    fully_shard(model, mesh=world.mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed: the loss is already divided by the target tokens of the
            # whole step, so no rank's share needs another weight.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer gets, in model order."""
    return [p for p in model.parameters() if p.requires_grad]


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> float:
    """Scales the gradients in place so that their global L2 norm is at most `max_norm`.

    Returns the norm before clipping, over all parameters of all ranks; None clips nothing.
    """
    grads = [param.grad for param in parameters if param.grad is not None]
    # On this rank's rows: as an operation on DTensors it took 2 to 5 times as long (420 adapters).
    rows = [local_part(grad) for grad in grads]
    norm = nn.utils.get_total_norm(rows)
    if sharded := [grad for grad in grads if isinstance(grad, DTensor)]:
        norm = norm.square()
        dist.all_reduce(norm, group=sharded[0].device_mesh.get_group())
        norm = norm.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(rows, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm.item()


def packed_bytes(model: nn.Module) -> int:
    """Bytes of packed weights that this rank holds, without the replicated extras."""
    local = map(local_part, model.parameters())
    return sum(p.packed.numel() for p in local if isinstance(p, PackedTensor))
