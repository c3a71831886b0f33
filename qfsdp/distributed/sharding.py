"""FSDP2: how a decoder's parameters are spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.stores import DeviceAhead, DiskStore, HostStore
from qfsdp.distributed.strategy import ShardingConfig, mesh_shape, needs_fsdp
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import AdaptedLinear, base_parameters
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.modules.targets import replace_module
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


def shard_model(model: Decoder, config: ShardingConfig, world: World) -> None:
    """Shards the parameters of `model`, on the meta device, by rows over the ranks (FSDP2).

    Each unit is gathered at once: decoder layers (or their linears), the embeddings, and the
    output layer. Embeddings that are tied to the output layer belong to the root, like the last
    norm, and stay gathered for the step. Frozen weights are held in the compute dtype and adapters
    cast themselves, so gathering casts nothing and one rank computes the same as many. Trained
    weights are cast to `model.compute_dtype`, and their gradients are reduced in fp32.

    A single process that offloads and casts nothing wraps nothing: FSDP2 would copy every
    parameter. With strategy "ddp" the units have trained parameters only.
    """
    if not needs_fsdp(config, world.size, _casts(model)):
        return
    if config.offload_base != "none":
        _offload_base(model, config, world)
    unit = _unit_options(model, config, world)
    body = model.model
    for layer in body.layers:
        if config.wrap == "linear":
            for module in layer.modules():
                if isinstance(module, AdaptedLinear | QuantizedLinear | nn.Linear):
                    _shard_unit(module, **unit)
        _shard_unit(layer, **unit)
    if model.lm_head.weight is not body.embed_tokens.weight:
        _shard_unit(body.embed_tokens, **unit)
        _shard_unit(model.lm_head, **unit | {"reshard_after_forward": False})
    # The root's own parameters are used first and last, so it does not reshard after forward.
    fully_shard(model, **unit | {"reshard_after_forward": None})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed: the loss is already divided by the target tokens of the
            # whole step.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _set_prefetch([m for m in body.modules() if isinstance(m, FSDPModule)], config.prefetch)


def _casts(model: Decoder) -> bool:
    """Whether a trained parameter has another dtype than the model computes in."""
    trained = {param.dtype for param in trainable_parameters(model)}
    return model.compute_dtype is not None and trained != {model.compute_dtype}


def _unit_options(model: Decoder, config: ShardingConfig, world: World) -> dict[str, Any]:
    """The arguments of `fully_shard` for every unit."""
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
        # Quantized weights are not cast: the dtype that they report is the compute dtype.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        # Pinning raises without an accelerator.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    return options


def _shard_unit(module: nn.Module, ignored_params: set[nn.Parameter] | None = None, **unit: Any):
    """Applies `fully_shard` if the unit has a parameter that is not ignored."""
    ignored = ignored_params or set()
    if any(param not in ignored for param in module.parameters()):
        fully_shard(module, ignored_params=ignored, **unit)


def _set_prefetch(units: list[FSDPModule], depth: int) -> None:
    """Sets how many of `units` (in the order of forward) are gathered ahead.

    FSDP2 gathers one ahead by default: in forward the host runs ahead of the device and requests
    the next unit while one computes; in backward FSDP2 requests it explicitly.
    """
    if depth == 1:
        return
    for index, unit in enumerate(units):
        if depth > 1:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
        before = units[max(0, index - depth) : index][::-1]
        # For FSDP2 an empty list means the default; a unit that lists itself prefetches nothing.
        unit.set_modules_to_backward_prefetch(before if before else [unit])


def shard_rank(config: ShardingConfig, world: World) -> int:
    """Index of the rows of trained parameters that this rank holds.

    Ranks of different hybrid groups that hold the same rows get the same index. Code that draws
    random numbers for rows seeds them with it, so that these ranks draw the same numbers.
    """
    shard = mesh_shape(config, world.size, world.local_size)[1]
    return world.rank % shard if config.strategy.startswith("hybrid") else world.rank


def _offload_base(model: Decoder, config: ShardingConfig, world: World) -> None:
    """Moves the frozen weights of the linears to host memory or disk.

    Weights that are not quantized become rows of bytes too (`PlainRows`). Embeddings, norms and
    the output layer stay on the device, except a quantized output layer.
    """
    store = HostStore if config.offload_base == "cpu" else DiskStore
    single = mesh_shape(config, world.size, world.local_size)[1] == 1  # FSDP2 does not prefetch
    ahead = DeviceAhead(world.device) if single else None
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head" and not module.weight.requires_grad:
            module = QuantizedLinear(module.weight, module.bias)
            replace_module(model, name, module)
        if not isinstance(module, AdaptedLinear | QuantizedLinear):
            continue
        weight = module.weight.data
        if not isinstance(weight, QuantizedTensor):
            if name == "lm_head":
                continue
            rows, cols = weight.shape
            weight = PlainRows.empty(rows, cols, weight.dtype, weight.device)
        unit = name
        if config.wrap == "decoder_layer":
            unit = ".".join(name.split(".")[:3])  # model.layers.7
        module.weight = nn.Parameter(weight.keep_in(store(unit, ahead)), requires_grad=False)


def quantized_bytes(model: nn.Module) -> int:
    """Bytes of quantized weights that this rank holds, without the replicated metadata."""
    local = map(local_part, model.parameters())
    return sum(p.qdata.numel() for p in local if isinstance(p, QuantizedTensor))
