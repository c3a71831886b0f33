"""A model to generate or score with: a base, an adapter or none, sharded, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qfsdp.checkpoint.adapter_files import check_adapter, load_adapter, read_adapter_config
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig, check_disk, load_base
from qfsdp.checkpoint.weights.quantize import open_weights
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import add_adapters, refresh_dora_norms
from qfsdp.modules.compute_dtype import compute_dtype
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder


def check_for_inference(
    model: ModelConfig,
    quantization: QuantizationConfig,
    adapter: str | None,
    sharding: ShardingConfig,
) -> Decoder:
    """The preflight of `load_for_inference`: reads configs and headers, no tensor.

    Returns the decoder on the meta device, for what a recipe has to check about it.

    Raises:
        UserError: the model folder or the adapter is not what it should be, or they are not of one
            model.
    """
    weights = ModelWeights(model.path)
    decoder = _build(model, quantization, adapter, weights)
    weights.check(decoder)
    if sharding.offload_base == "disk" and model.quantize_cache is None:
        check_disk(decoder, weights)
    if adapter is not None:
        check_adapter(read_adapter_config(adapter), adapter, decoder)
    return decoder


def load_for_inference(
    model: ModelConfig,
    quantization: QuantizationConfig,
    adapter: str | None,
    sharding: ShardingConfig,
    world: World,
) -> Decoder:
    """The model in eval mode, without gradients; every rank must call it.

    With strategy "ddp" every rank has all of it, adapters too, and ranks compute independently.
    Other strategies gather a layer for every token of a batch: take them where one rank cannot
    hold the packed base.

    Args:
        model, quantization: the base: plain, packed as it is loaded, or stored packed.
        adapter: a folder in PEFT's format, or None.

    Raises:
        UserError: as `check_for_inference`, or a weight holds NaN or infinity.
    """
    weights = open_weights(model, quantization, world)
    decoder = _build(model, quantization, adapter, weights)
    if sharding.strategy != "ddp":
        shard_model(decoder, sharding, world)
    load_base(decoder, weights, world.device, sharding, progress=world.rank == 0)
    if adapter is not None:
        load_adapter(decoder, adapter)
        refresh_dora_norms(decoder)
    return decoder.eval()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode and records no gradients; afterwards as it was before.

    Sharded units are freed at the end: without a backward pass FSDP2 keeps the root (and with
    strategy "shard_grad_op" every unit) gathered, and a parameter that is gathered is no DTensor,
    which whoever reads parameters next (optimizer, checkpoint) expects it to be.
    """
    trained = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(trained)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _build(
    model: ModelConfig,
    quantization: QuantizationConfig,
    adapter: str | None,
    weights: ModelWeights,
) -> Decoder:
    """On the meta device: linears packed, adapters in place, nothing trained."""
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_dir(model.folder)).to(compute_dtype(model.dtype))
    quantize_linears(decoder, quantization, weights.formats)
    if adapter is not None:
        add_adapters(decoder, read_adapter_config(adapter))
    return decoder.requires_grad_(False)
