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
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from qfsdp.checkpoint.sources import base_parameters
from qfsdp.errors import InvalidField, UserError
from qfsdp.modules.adapters import AdaptedLinear
from qfsdp.modules.packed_linear import PackedLinear
from qfsdp.modules.shards import local_part, mesh_device, shard_group
from qfsdp.modules.targets import replace_module
from qfsdp.modules.transformer import Decoder
from qfsdp.offload import DeviceAhead, DiskStore, HostStore
from qfsdp.sizes import parse_size
from qfsdp.tensor_subclasses.packed import PackedTensor
from qfsdp.tensor_subclasses.plain import PlainRows

T = TypeVar("T")

# Attribute of a parameter whose gradient was used up in backward: its norm on this rank, fp32.
USED_GRAD_NORM = "_used_grad_norm"


@dataclass
class ShardingConfig:
    """Section `sharding`: what is spread over the ranks, and in which units.

    Fields:
        strategy: "full_shard": parameters, gradients and optimizer state are spread over all
            ranks. "shard_grad_op": parameters are gathered for forward and kept until backward is
            through; faster, and as large as the model. "ddp": the frozen base whole on every rank;
            what is trained, gradients and optimizer state spread. "hybrid_full_shard",
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

    def check(self) -> None:
        for name in ("replicate", "shard"):
            value = getattr(self, name)
            if value is not None and not self.strategy.startswith("hybrid"):
                raise InvalidField(name, value, "null, or a strategy that starts with hybrid")
            if value is not None and value < 1:
                raise InvalidField(name, value, "an integer of at least 1, or null")
        if self.prefetch < 0:
            raise InvalidField("prefetch", self.prefetch, "an integer of at least 0")
        if self.offload_base != "none" and self.cpu_offload:
            why = "none: cpu_offload takes the base to host memory already"
            raise InvalidField("offload_base", self.offload_base, why)
        if self.strategy == "ddp" and (self.offload_base != "none" or self.cpu_offload):
            raise InvalidField("strategy", "ddp", "full_shard, with anything offloaded")
        try:
            parse_size(self.ring_memory)
        except ValueError:
            raise InvalidField("ring_memory", self.ring_memory, "a size such as 4GiB") from None


@dataclass(frozen=True)
class World:
    """This process among the others.

    Fields:
        device: where this rank computes.
        rank: 0 .. size - 1. Rank 0 writes files and prints.
        size: number of processes.
        mesh: 1-D device mesh over all of them; None with one process, where FSDP2 does nothing.
        local_size: number of processes on this machine.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    local_size: int = 1

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


def init_world(sharding: ShardingConfig | None = None, casts: bool = False) -> World:
    """Joins the processes that torchrun started (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`).

    Uses the accelerator `LOCAL_RANK` of this machine where there is one, else the CPU. A
    single process joins nothing and gets no mesh, unless `sharding` offloads something or the
    model is held in another dtype than it computes in (`casts`).

    Raises:
        UserError: this machine has fewer accelerators than processes, or the sizes in `sharding`
            do not make up the number of processes.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    rank = int(os.environ.get("RANK", 0))
    if sharding is not None:
        mesh_shape(sharding, size, local_size)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= (count := torch.accelerator.device_count()):
            raise UserError(f"--nproc_per_node: rank {rank} needs one of {count} accelerators here")
        torch.accelerator.set_device_index(local_rank)
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        device = torch.device(kind.type, local_rank)
    if not _needs_fsdp(sharding or ShardingConfig(), size, casts):
        return World(device)
    if not dist.is_initialized():
        # An explicit device lets NCCL connect at once, and not inside the first collective.
        options: dict[str, Any] = {"device_id": device if device.type != "cpu" else None}
        if size == 1:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(**options)
    return World(device, rank, size, init_device_mesh(device.type, (size,)), local_size)


def mesh_shape(config: ShardingConfig, size: int, local_size: int) -> tuple[int, int]:
    """Groups that hold the same, and ranks of a group, among `size` ranks, `local_size` of them on
    a machine.

    Raises:
        UserError: they do not make up the number of ranks.
    """
    replicate, shard = config.replicate, config.shard
    if not config.strategy.startswith("hybrid"):
        return (size, 1) if config.strategy == "ddp" else (1, size)
    if shard is None:
        shard = size // replicate if replicate else local_size
    if replicate is None:
        replicate = max(1, size // shard)
    if replicate * shard != size:
        raise UserError(
            f"sharding.replicate x sharding.shard: {replicate} x {shard}; this run has {size} "
            f"processes, {local_size} on this machine"
        )
    return replicate, shard


def shard_rank(config: ShardingConfig, world: World) -> int:
    """Which rows this rank holds of what is trained: ranks of hybrid groups that hold the same rows
    have the same number. What draws random numbers for rows must draw the same on these."""
    shard = mesh_shape(config, world.size, world.local_size)[1]
    return world.rank % shard if config.strategy.startswith("hybrid") else world.rank


def shard_model(model: Decoder, config: ShardingConfig, world: World) -> None:
    """Shards the parameters of `model`, on the meta device, by rows over the ranks (FSDP2).

    The units, each gathered as one: decoder layers (or their linears), the embeddings, and the
    output layer. Where the embeddings are also the output layer they belong to the root, as the
    last norm does, and stay gathered for the step. Frozen weights are held in the compute dtype
    and adapters cast themselves: none of them is cast while it is gathered, so that one rank and
    many run the same arithmetic. Weights that are trained are cast to `model.compute_dtype`, and
    their gradients reduced in fp32.

    With a single process, nothing offloaded and nothing to cast nothing is wrapped: FSDP2 would
    copy every parameter. With strategy "ddp" its units have what is trained only.
    """
    if not _needs_fsdp(config, world.size, _casts(model)):
        return
    if config.offload_base != "none":
        _keep_base_elsewhere(model, config, world)
    unit = _unit_options(model, config, world)
    body = model.model
    for layer in body.layers:
        if config.wrap == "linear":
            for module in layer.modules():
                if isinstance(module, AdaptedLinear | PackedLinear | nn.Linear):
                    _shard_unit(module, **unit)
        _shard_unit(layer, **unit)
    if model.lm_head.weight is not body.embed_tokens.weight:
        _shard_unit(body.embed_tokens, **unit)
        _shard_unit(model.lm_head, **unit | {"reshard_after_forward": False})
    # The root's own parameters are used first and last; it never reshards after forward.
    fully_shard(model, **unit | {"reshard_after_forward": None})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed: the loss is already divided by the target tokens of the
            # whole step, so no rank's share needs another weight.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _set_prefetch([m for m in body.modules() if isinstance(m, FSDPModule)], config.prefetch)


def _needs_fsdp(config: ShardingConfig, world_size: int, casts: bool = False) -> bool:
    return world_size > 1 or config.cpu_offload or config.offload_base != "none" or casts


def _casts(model: Decoder) -> bool:
    """Whether something is trained in another dtype than the model computes in."""
    trained = {param.dtype for param in trainable_parameters(model)}
    return model.compute_dtype is not None and trained != {model.compute_dtype}


def _unit_options(model: Decoder, config: ShardingConfig, world: World) -> dict[str, Any]:
    """What `fully_shard` is told for every unit."""
    assert world.mesh is not None
    options: dict[str, Any] = {
        "mesh": world.mesh,
        "reshard_after_forward": config.strategy in ("full_shard", "hybrid_full_shard"),
    }
    if config.strategy.startswith("hybrid"):
        shape = mesh_shape(config, world.size, world.local_size)
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    if config.strategy == "ddp":
        frozen = {param for _, param in base_parameters(model) if not param.requires_grad}
        options["ignored_params"] = frozen
    if model.compute_dtype is not None:
        # Packed weights come through as they are: what they report as dtype is the compute dtype.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        # Pinned where there is an accelerator: without one, pinning raises.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    return options


def _shard_unit(module: nn.Module, ignored_params: set[nn.Parameter] | None = None, **unit: Any):
    """`fully_shard`, if that leaves the unit a parameter to shard."""
    ignored = ignored_params or set()
    if any(param not in ignored for param in module.parameters()):
        fully_shard(module, ignored_params=ignored, **unit)


def _set_prefetch(units: list[FSDPModule], depth: int) -> None:
    """How many of `units` (in the order of forward) are gathered ahead.

    One is FSDP2's own way: the host runs ahead of the device, and asks for the next unit while
    this one computes; in backward it asks for it explicitly.
    """
    if depth == 1:
        return
    for index, unit in enumerate(units):
        if depth > 1:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
        before = units[max(0, index - depth) : index][::-1]
        # FSDP2 takes an empty list for "as usual"; a unit that waits for itself prefetches none.
        unit.set_modules_to_backward_prefetch(before if before else [unit])


def _keep_base_elsewhere(model: Decoder, config: ShardingConfig, world: World) -> None:
    """The frozen weights of the linears are to lie in host memory, or on disk.

    Weights that are not packed become rows of bytes too. Embeddings, norms and the output layer
    stay on the device, unless the output layer is packed.
    """
    kind = HostStore if config.offload_base == "cpu" else DiskStore
    alone = mesh_shape(config, world.size, world.local_size)[1] == 1
    ahead = DeviceAhead(world.device) if alone else None
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head" and not module.weight.requires_grad:
            module = PackedLinear(module.weight, module.bias)
            replace_module(model, name, module)
        if not isinstance(module, AdaptedLinear | PackedLinear):
            continue
        weight = module.weight.data
        if not isinstance(weight, PackedTensor):
            if name == "lm_head":
                continue
            rows, cols = weight.shape
            weight = PlainRows.empty(rows, cols, weight.dtype, weight.device)
        unit = name
        if config.wrap == "decoder_layer":
            unit = ".".join(name.split(".")[:3])  # model.layers.7
        module.weight = nn.Parameter(weight.keep_in(kind(unit, ahead)), requires_grad=False)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer gets, in model order."""
    return [p for p in model.parameters() if p.requires_grad]


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales the gradients in place so that their global L2 norm is at most `max_norm`.

    Returns the norm before clipping, over all parameters of all ranks, fp32 `[]`; None clips
    nothing. A tensor, so that nobody waits for it before the rest of the step is on its way.
    A gradient that was used up in backward counts by the norm that it left (`USED_GRAD_NORM`).
    """
    parameters = list(parameters)
    # On this rank's rows: as an operation on DTensors it took 2 to 5 times as long (420 adapters).
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


def packed_bytes(model: nn.Module) -> int:
    """Bytes of packed weights that this rank holds, without the replicated extras."""
    local = map(local_part, model.parameters())
    return sum(p.packed.numel() for p in local if isinstance(p, PackedTensor))
