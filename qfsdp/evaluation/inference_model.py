"""Builds and loads a model for generation or evaluation: a base with or without an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qfsdp.checkpoint.adapter_config_file import HEAD_KEY
from qfsdp.checkpoint.adapter_files import (
    add_read_adapters,
    check_adapter,
    load_adapter,
    read_adapter_config,
    read_adapter_header,
)
from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.checkpoint.weights.quantize import check_weights, open_weights
from qfsdp.common.errors import UserError
from qfsdp.distributed.sharding import reshard, shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.hub.download import local_folder
from qfsdp.modules.adapters.folded import fold_adapters
from qfsdp.modules.adapters.whole import keep_computed
from qfsdp.modules.hub_models.decoder import AnyDecoder, share_base
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.score_head import HeadConfig, add_score_head
from qfsdp.tensor_subclasses import nf4_by_bitsandbytes


def stored_head(folder: str | Path) -> HeadConfig:
    """The score head of an adapter. Raises UserError: see `read_adapter_config`; or it has none."""
    found = read_adapter_header(local_folder(folder)).get(HEAD_KEY)
    if found is None:
        expected = "expected an adapter of recipes/reward_distributed, or PEFT's of type SEQ_CLS"
        raise UserError(f"adapter: '{folder}' has no score head; {expected}")
    return HeadConfig(classes=found.shape[0])


def check_for_inference(
    model: ModelConfig,
    quantization: QuantizationConfig,
    adapter: str | None,
    sharding: ShardingConfig,
    head: HeadConfig | None = None,
) -> AnyDecoder:
    """Checks the arguments of `load_for_inference`. Reads configs and headers but no tensors.

    Returns:
        The decoder on the meta device, for further checks by a recipe.

    Raises:
        UserError: the model folder or the adapter is faulty, or the adapter is for another model.
    """
    if (parts := sharding.context_parallel) > 1:
        raise UserError(f"sharding.context_parallel: {parts}; expected 1, as nothing is trained")
    weights = model.weights()
    decoder = build_frozen(model, quantization, adapter, weights, head)
    check_weights(decoder, weights, model, quantization, sharding)
    if adapter is not None:
        check_adapter(read_adapter_config(adapter), adapter, decoder)
    return decoder


def load_for_inference(
    model: ModelConfig,
    quantization: QuantizationConfig,
    adapter: str | None,
    sharding: ShardingConfig,
    world: World,
    head: HeadConfig | None = None,
) -> AnyDecoder:
    """Loads the model in eval mode, without gradients. Every rank must call it.

    With strategy "ddp" every rank holds the whole model and computes on its own. Other strategies
    gather every layer once per generated token. Use them if one rank cannot hold the quantized
    base.

    Args:
        model, quantization: the base: plain, quantized while it is loaded, or stored quantized.
        adapter: a folder in PEFT's format, or None.
        head: the score head that the adapter has (`stored_head`); None: an output layer is used.

    Raises:
        UserError: `check_for_inference` raises it, or a weight holds NaN or infinity.
    """
    weights = open_weights(model, quantization, world)
    decoder = build_frozen(model, quantization, adapter, weights, head)
    if sharding.strategy != "ddp":
        shard_model(decoder, sharding, world)
    load_base(decoder, weights, world.device, sharding, progress=world.rank == 0)
    if adapter is not None:
        load_adapter(decoder, adapter)
        refresh_dora_norms(decoder)
    if sharding.strategy == "ddp":
        fold_adapters(decoder)
        nf4_by_bitsandbytes.use_for(decoder)
    return decoder.eval()


def load_adapters_of_one_base(
    model: ModelConfig,
    quantization: QuantizationConfig,
    base_name: str,
    adapters: Mapping[str, str],
    world: World,
) -> dict[str, AnyDecoder]:
    """The decoder of the base and, for each adapter, one that shares the base's weights.

    The base is in memory once. Each decoder adds its own adapter to it.

    Args:
        base_name: key of the base itself in the result.
        adapters: name -> folder in PEFT's format.

    Raises:
        UserError: as `load_for_inference`.
    """
    base = load_for_inference(model, quantization, None, ShardingConfig(strategy="ddp"), world)
    decoders, weights = {base_name: base}, model.weights()
    for name, folder in adapters.items():
        decoder = build_frozen(model, quantization, folder, weights)
        share_base(decoder, base)
        for module in decoder.modules():
            for field, param in list(module.named_parameters(recurse=False)):
                if param.is_meta:
                    empty = torch.empty_like(param, device=world.device)
                    setattr(module, field, torch.nn.Parameter(empty, requires_grad=False))
        decoder.tie_weights()  # where both are the adapter's own
        load_adapter(decoder, folder)
        refresh_dora_norms(decoder)
        fold_adapters(decoder)
        nf4_by_bitsandbytes.use_for(decoder)
        decoders[name] = decoder.eval()
    return decoders


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context with the model in eval mode and without gradients. Restores its mode at the end.

    It also reshards the model at the end. Without a backward pass FSDP2 keeps the root gathered
    (with strategy "shard_grad_op" every unit). A gathered parameter is not a DTensor, but the
    optimizer and checkpoints expect one.
    """
    trained = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(trained)
        reshard(model)


def build_frozen(
    model: ModelConfig,
    quantization: QuantizationConfig,
    adapter: str | None,
    weights: Any,
    head: HeadConfig | None = None,
) -> AnyDecoder:
    """The decoder on the meta device, with quantized linears and adapters, without gradients.

    Args:
        weights: `ModelWeights` or, for a dry run, what else has their `formats`.
    """
    decoder = model.build()
    quantize_linears(decoder, quantization, weights.formats)
    if adapter is not None:
        add_read_adapters(decoder, adapter)
        keep_computed(decoder)
    if head is not None:
        add_score_head(decoder, head)
    return decoder.requires_grad_(False)
