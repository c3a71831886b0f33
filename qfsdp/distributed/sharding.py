"""FSDP2: how a decoder's parameters are spread over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from qfsdp.common import progress
from qfsdp.distributed.context_parallel import share_rows
from qfsdp.distributed.expert_parallel import (
    check_expert_parallel,
    expert_mesh,
    keep_own_experts,
    see_all_rows,
)
from qfsdp.distributed.gradients import REDUCES_NOW, reduces_every_update, trainable_parameters
from qfsdp.distributed.split_vocabulary import SplitVocabulary, splits_vocabulary
from qfsdp.distributed.stores import DeviceAhead, DiskStore, HostStore
from qfsdp.distributed.strategy import ShardingConfig, mesh_shape, needs_fsdp
from qfsdp.distributed.world import World, new_mesh
from qfsdp.modules.adapters.linears import LowRankRouter
from qfsdp.modules.adapters.several import OneOfSeveral
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.experts.stacked import ExpertLinear
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.low_rank.adapted import AdaptedLinear
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.modules.targets import replace_module
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.kernels.host_memory import HostBlocks
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

LINEARS = (AdaptedLinear, QuantizedLinear, ExpertLinear, nn.Linear)
"""Units with `wrap: linear`."""


def shard_model(
    model: AnyDecoder, config: ShardingConfig, world: World, tokens: int | None = None
) -> None:
    """Shards the parameters of `model`, on the meta device, by rows over the ranks (FSDP2).

    Each unit is gathered at once: decoder layers (or their linears), the embeddings, and the
    output layer. Embeddings that are tied to the output layer belong to the root, like the last
    norm, and stay gathered for the step. Frozen weights are held in the compute dtype and adapters
    cast themselves, so gathering casts nothing and one rank computes the same as many. Trained
    weights are cast to `model.compute_dtype`, and their gradients are reduced in fp32.

    With expert parallelism the experts of a layer, or their linears, are units of their own,
    gathered over fewer ranks. With context parallelism nothing is sharded in another way.

    A single process that offloads and casts nothing wraps nothing: FSDP2 would copy every
    parameter. With strategy "ddp" the units have trained parameters only.

    Args:
        tokens: of a rank's micro-batch, at most, for `config.vocabulary`; None: not known.

    Raises:
        UserError: `config` asks for something that this model or number of ranks cannot have.
    """
    follow_layers(model, set(model.parts.layers))
    if config.expert_parallel > 1:
        check_expert_parallel(cast(Any, model), config, world.size)
    if not needs_fsdp(config, world.size, _casts(model)):
        return
    if config.context_parallel > 1:
        share_rows(cast(Any, model), config.context_parallel, world)
    if config.offload_base != "none":
        _offload_base(model, config, world)
    unit = _unit_options(model, config, world)
    if config.expert_parallel > 1:
        _shard_experts(model, config, world, unit)
    parts = model.parts
    for layer in parts.layers:
        if config.wrap == "linear":
            _shard_linears(layer, unit)
        _shard_unit(layer, **unit)
    if splits_vocabulary(model, config, unit["mesh"].size(-1), tokens):
        model.split = SplitVocabulary(cast(Any, model), unit["mesh"], world)
        unit["ignored_params"] = unit.get("ignored_params", set()) | model.split.parameters
    elif parts.output.weight is not parts.embedding.weight:
        _shard_unit(parts.embedding, **unit)
        _shard_unit(parts.output, **unit | {"reshard_after_forward": False})
    # The root's own parameters are used first and last, so it does not reshard after forward.
    fully_shard(model, **unit | {"reshard_after_forward": None})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed: the loss is divided by the target tokens of the whole step.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _set_prefetch(parts.body, config.prefetch)
    if reduces_every_update(model, config):
        setattr(model, REDUCES_NOW, True)


def _shard_experts(
    model: AnyDecoder, config: ShardingConfig, world: World, unit: dict[str, Any]
) -> None:
    """Shards the experts of every mixture over the ranks of one part."""
    assert world.mesh is not None
    mesh = expert_mesh(config, world)
    for experts in keep_own_experts(cast(Any, model), mesh):
        of_unit = unit | {"mesh": mesh["rows"]}
        linears = experts.children() if config.wrap == "linear" else [experts]
        for module in linears:
            _shard_unit(module, **of_unit)
        see_all_rows(experts, world.mesh, config.expert_parallel)


def _casts(model: AnyDecoder) -> bool:
    """Whether a trained parameter has another dtype than the model computes in."""
    trained = {param.dtype for param in trainable_parameters(model)}
    return model.compute_dtype is not None and trained != {model.compute_dtype}


def _unit_options(model: AnyDecoder, config: ShardingConfig, world: World) -> dict[str, Any]:
    """The arguments of `fully_shard` for every unit."""
    assert world.mesh is not None
    options: dict[str, Any] = {
        "mesh": world.mesh,
        "reshard_after_forward": config.strategy in ("full_shard", "hybrid_full_shard"),
    }
    if config.strategy.startswith("hybrid"):
        shape = mesh_shape(config, world.size, world.local_size)
        options["mesh"] = new_mesh(world, shape, ("replicate", "shard"))
    if config.strategy == "ddp":
        frozen = {param for _, param in base_parameters(model) if not param.requires_grad}
        options["ignored_params"] = frozen
    if model.compute_dtype is not None:
        # What is frozen in fp32, such as routers' corrections, would be cast: each rank has it all.
        kept = {p for p in model.parameters() if not p.requires_grad}
        kept = {p for p in kept if p.dtype != model.compute_dtype}
        options["ignored_params"] = options.get("ignored_params", set()) | kept
        # Quantized weights are not cast: the dtype that they report is the compute dtype.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        # Pinning raises without an accelerator.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    return options


def _shard_linears(layer: nn.Module, unit: dict[str, Any]) -> None:
    """Makes each linear of a layer a unit. FSDP2 warns that what they return is a view; no layer
    changes it in place."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP\w+Linear\)", UserWarning)
    for module in layer.modules():
        if isinstance(module, LINEARS) and not isinstance(module, FSDPModule | OneOfSeveral):
            _shard_unit(module, **unit)


def _shard_unit(module: nn.Module, ignored_params: set[nn.Parameter] | None = None, **unit: Any):
    """Applies `fully_shard` if the unit has a parameter that is not ignored."""
    ignored = ignored_params or set()
    if any(param not in ignored for param in module.parameters()):
        fully_shard(module, ignored_params=ignored, **unit)


def _set_prefetch(body: nn.Module, depth: int) -> None:
    """Sets how many units of `body` are gathered ahead.

    FSDP2 gathers one ahead by default: in forward the host runs ahead of the device and requests
    the next unit while one computes; in backward FSDP2 requests the one before.

    Backward ends at the first unit with a trained parameter. The units before it must not be
    gathered again. If only adapters are trained, that is the embedding: at 70B on 8 ranks it costs
    2.1 GB of memory and 1.84 GB sent, per rank and micro-batch.
    """
    entered: list[FSDPModule] = [m for m in body.modules() if isinstance(m, FSDPModule)]
    left: list[Any] = list(_units_as_left(body))
    if depth > 1:
        for index, unit in enumerate(entered):
            unit.set_modules_to_forward_prefetch(entered[index + 1 : index + 1 + depth])
    trains = [any(param.requires_grad for param in unit.parameters()) for unit in left]
    first = trains.index(True) if True in trains else len(left)
    for index, unit in enumerate(left):
        if depth != 1 or index == first:
            before = left[max(first, index - depth) : index][::-1]
            # For FSDP2 an empty list means the default. A unit that lists itself gathers nothing.
            unit.set_modules_to_backward_prefetch(before if before else [unit])


def _units_as_left(module: nn.Module) -> Iterator[FSDPModule]:
    """The units in the order in which forward leaves them; backward enters them in reverse."""
    for child in module.children():
        yield from _units_as_left(child)
    if isinstance(module, FSDPModule):
        yield module


def reshard(model: nn.Module) -> None:
    """Reshards all units: without a backward pass FSDP2 keeps some gathered."""
    for unit in _units_as_left(model):
        unit.reshard()


def shard_rank(config: ShardingConfig, world: World) -> int:
    """Index of the rows of trained parameters that this rank holds.

    Ranks of different hybrid groups that hold the same rows get the same index. Code that draws
    random numbers for rows seeds them with it, so that these ranks draw the same numbers.
    """
    shard = mesh_shape(config, world.size, world.local_size)[1]
    return world.rank % shard if config.strategy.startswith("hybrid") else world.rank


def _offload_base(model: AnyDecoder, config: ShardingConfig, world: World) -> None:
    """Moves the frozen weights of the linears to host memory or disk.

    Weights that are not quantized become rows of bytes too (`PlainRows`). Embeddings, norms and
    the output layer stay on the device, except a quantized output layer; so do linears whose weight
    a module of transformers reads by itself.
    """
    blocks = HostBlocks()
    shards = mesh_shape(config, world.size, world.local_size)[1]
    ahead = DeviceAhead(world.device) if copies_ahead(config, world) else None
    parts, plain = model.parts, set(getattr(model, "plain_linears", ()))
    names = {module: name for name, module in model.named_modules()}
    output, layer = names[parts.output], names[parts.layers[0]].split(".")
    for name, module in list(model.named_modules()):
        inside = name.split(".")[: len(layer) - 1] == layer[:-1] and name not in plain
        if isinstance(module, nn.Linear) and inside and not module.weight.requires_grad:
            module = QuantizedLinear(module.weight, module.bias)
            replace_module(model, name, module)
        if not isinstance(module, AdaptedLinear | QuantizedLinear | ExpertLinear):
            continue
        if isinstance(module, LowRankRouter | OneOfSeveral):
            continue
        weight = module.weight.data
        if not isinstance(weight, QuantizedTensor):
            if name == output:
                continue
            rows, cols = weight.shape
            weight = PlainRows.empty(rows, cols, weight.dtype, weight.device)
        unit = name
        if config.wrap == "decoder_layer":
            unit = ".".join(name.split(".")[: len(layer)])  # model.layers.7
        store: DiskStore | HostStore
        if config.offload_base == "disk":
            store = DiskStore(unit, ahead)
        else:
            rows = -(-weight.size(0) // shards)
            blocks.expected += rows * weight.qdata.size(1)
            store = HostStore(unit, ahead, blocks, rows)
        module.weight = nn.Parameter(weight.keep_in(store), requires_grad=False)


def copies_ahead(config: ShardingConfig, world: World) -> bool:
    """Whether `DeviceAhead` copies the offloaded weights: on one rank FSDP2 does not prefetch."""
    single = mesh_shape(config, world.size, world.local_size)[1] == 1
    return config.offload_base != "none" and single


def quantized_bytes(model: nn.Module) -> int:
    """Bytes of quantized weights that this rank holds, without the replicated metadata."""
    local = map(local_part, model.parameters())
    return sum(p.qdata.numel() for p in local if isinstance(p, QuantizedTensor))


def follow_layers(model: Any, layers: Collection[Any]) -> None:
    """Has each of `layers`, modules of `model`, tell when it begins, forward and backward.

    A phase may take longer than the watchdog's limit: forward of a row of 65,536 tokens took over
    30 minutes on one core. Hooks run outside of compiled blocks, 10 us a layer and micro-batch.
    """
    for name, layer in model.named_modules():
        if layer in layers:
            layer.register_forward_pre_hook(partial(progress.layer_begins, name))
            layer.register_forward_hook(partial(progress.layer_ends, name))
