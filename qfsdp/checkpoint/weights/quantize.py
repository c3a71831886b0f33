"""Quantizes a model folder once, so that later runs load bytes instead of quantizing.

A rank holds at most one quantized weight and three pieces of 16 MB. The same command finishes an
interrupted conversion. Ranks communicate only at its start and end.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qfsdp.checkpoint.adapter_files import add_read_adapters, check_adapter
from qfsdp.checkpoint.weights.bnb_layout import bnb_config, bnb_group, write_bnb
from qfsdp.checkpoint.weights.convert import (
    CPU,
    WeightConversion,
    convert_folder,
    copied,
    read_as_quantized,
    whole_reads,
)
from qfsdp.checkpoint.weights.experts import PARAMETER, stored_as
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.on_disk import check_disk
from qfsdp.checkpoint.weights.output_folder import ResumableFolder
from qfsdp.checkpoint.weights.qfsdp_layout import (
    MANIFEST,
    VERSION,
    quantized_group,
    write_quantized,
)
from qfsdp.checkpoint.weights.read import STORED_DTYPES, Pieces
from qfsdp.checkpoint.weights.verify import changed_settings
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES, SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.common.terminal import warn
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_parts import DecoderParts
from qfsdp.modules.hub_models.config import model_config
from qfsdp.modules.hub_models.decoder import AnyDecoder, build_decoder
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

Layout = Literal["qfsdp", "bnb"]


def quantize_folder(
    weights: ModelWeights,
    quantization: QuantizationConfig,
    folder: Path,
    world: World,
    layout: Layout = "qfsdp",
    max_file_bytes: int = MAX_FILE_BYTES,
    key: str = "output_dir",
    cache: bool = False,
    repair: bool = False,
) -> None:
    """Writes a model folder with the targeted linears quantized.

    Every rank must call it and see `folder`; each rank converts a part of the files. An unfinished
    folder is finished. In a finished one, files that do not match their checksums are written
    again.

    Args:
        layout: "qfsdp" (docs/internals/quantized-folders.md), or "bnb", which transformers loads
            with bitsandbytes.
        key: the config key of `folder`, for messages.
        cache, repair: see `ResumableFolder`.

    Raises:
        UserError: the weights do not match their config.json, or see `convert_folder`.
    """
    model = quantized_model(weights, quantization)
    weights.check(model)
    conversions = {
        name: _conversion(weights, name, param.data, layout, world.device, model.config)
        for name, param in base_parameters(model)
    }
    quantized = quantized_weights(model)
    source: dict[str, str | None] | None = None
    if world.rank == 0:  # which writes it
        source = {"path": str(weights.folder), "fingerprint": weights.fingerprint}
        source |= {"digest": weights.digest}
    settings = {
        "version": VERSION,
        "layout": layout,
        "format": quantization.format,
        "targets": quantization.targets,
        "max_file_bytes": max_file_bytes,
        "source": source,
    }
    entries = {n: {"format": w.format, "shape": list(w.shape)} for n, w in quantized.items()}
    output = ResumableFolder(folder, key, {}, settings, entries, cache, repair)
    config = json.loads((weights.folder / "config.json").read_text())
    if layout == "qfsdp":
        section = {"quant_method": "qfsdp", "format": quantization.format}
    else:
        name, weight = next(iter(quantized.items()))
        # transformers quantizes every linear that is not listed here.
        skipped = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        section = bnb_config(weight.format, _source_dtype(weights, name), skipped)
    config["quantization_config"] = section
    convert_folder(conversions, weights, output, config, world, max_file_bytes)


def quantized_model(weights: ModelWeights, quantization: QuantizationConfig) -> Any:
    """The decoder on the meta device, with the targeted linears quantized."""
    config = weights.config or model_config(weights.folder, weights.implementation)
    model = build_decoder(config, torch.float32)
    quantize_linears(model, quantization, weights.formats)
    return model


def quantized_weights(model: nn.Module) -> dict[str, QuantizedTensor]:
    """Name -> quantized weight, of those of a model."""
    params = {name: param.data for name, param in model.named_parameters()}
    return {name: data for name, data in params.items() if isinstance(data, QuantizedTensor)}


def adapted_model(
    weights: ModelWeights, quantization: QuantizationConfig, adapter: str | Path
) -> Any:
    """As `quantized_model`, with an adapter. Reads headers of the base, and the adapter. Raises
    UserError: one of them is broken, or they belong to different models."""
    model = quantized_model(weights, quantization)
    weights.check(model)
    check_adapter(add_read_adapters(model, adapter), adapter, model)
    return model


def stored_quantization(weights: ModelWeights) -> QuantizationConfig:
    """A config that agrees with the formats of the folder, so that adapters can be added."""
    formats = {*weights.formats.values()} - {"none"}
    own: list[Any] = sorted(formats - {"mxfp4"})  # beside experts in mxfp4 any other will do
    return QuantizationConfig(own[0] if own else "nf4" if formats else "none")


def _conversion(
    weights: ModelWeights,
    name: str,
    param: Tensor,
    layout: Layout,
    device: torch.device,
    parts: DecoderParts,
) -> WeightConversion:
    """How a base parameter is stored; it is on the meta device, and quantized if it is to be."""
    if not isinstance(param, QuantizedTensor):
        stored = weights.plain[name]
        return copied(name, stored, stored_as(name, stored.shape, parts))
    if layout == "bnb" and PARAMETER.fullmatch(name):
        raise UserError(
            f"layout: bnb has no form for the experts of a mixture ({name!r}): transformers keeps "
            "them in 16 bits; expected layout=qfsdp"
        )
    format, (rows, cols) = param.format, param.shape
    dtype = _source_dtype(weights, name)

    def write(file: SafetensorsFile, pieces: Pieces) -> None:
        weight = read_as_quantized(weights, name, format, dtype, CPU, pieces)
        write_weight(file, name, weight)

    group = quantized_group if layout == "qfsdp" else bnb_group
    write_weight = write_quantized if layout == "qfsdp" else write_bnb
    # Bytes that are copied stay on the CPU.
    reads = whole_reads(weights, name, CPU if name in weights.quantized else device)
    return WeightConversion(group(name, format, rows, cols), reads, write)


def _source_dtype(weights: ModelWeights, name: str) -> torch.dtype:
    """The dtype that a weight had before it was quantized; bf16 if its folder does not say."""
    return STORED_DTYPES[weights.plain[name].dtype] if name in weights.plain else torch.bfloat16


def check_weights(
    model: AnyDecoder,
    weights: ModelWeights,
    config: ModelConfig,
    quantization: QuantizationConfig,
    sharding: ShardingConfig,
) -> None:
    """Raises UserError: a folder does not fit a model, or weights cannot stay on disk as they are.

    Those of `model.quantize_cache` can, and are perhaps not written yet.
    """
    weights.check(model)
    if sharding.offload_base == "disk" and not _takes_cache(config, quantization, weights):
        check_disk(model, weights)


def _takes_cache(
    config: ModelConfig, quantization: QuantizationConfig, weights: ModelWeights
) -> bool:
    """Whether a run quantizes weights, and keeps them in `model.quantize_cache`."""
    quantizes = quantization.format != "none" and not weights.quantized
    return config.quantize_cache is not None and quantizes


def open_weights(
    config: ModelConfig, quantization: QuantizationConfig, world: World
) -> ModelWeights:
    """The weights that a run loads: those of `model.path`, or their quantized copy in
    `model.quantize_cache`, which is written if it is missing.

    Every rank must call it.
    """
    weights = config.weights()
    if not _takes_cache(config, quantization, weights):
        return weights
    assert config.quantize_cache is not None
    base = world.broadcast(weights.digest if world.rank == 0 else None)  # hashed once
    targets = json.dumps([base, quantization.targets])
    digest = hashlib.sha256(targets.encode()).hexdigest()[:12]
    name = f"{weights.folder.resolve().name}-{quantization.format}-{digest}"
    folder = Path(config.quantize_cache).expanduser() / name
    key = "model.quantize_cache"

    def write(damage: str | None = None) -> ModelWeights:
        if damage is not None and world.rank == 0:
            warn(f"{key}: '{folder}' is damaged ({damage}); quantizing again")
        repair = damage is not None
        quantize_folder(weights, quantization, folder, world, key=key, cache=True, repair=repair)
        return ModelWeights(folder)

    if world.broadcast((folder / MANIFEST).is_file()):
        found, damage = _opened(folder, quantization)
        damage = next(filter(None, world.gather(damage)), None)
        found = found if damage is None else write(damage)
    else:
        found = write()
    assert found is not None
    found.write_again = write
    return found


def _opened(
    folder: Path, quantization: QuantizationConfig
) -> tuple[ModelWeights | None, str | None]:
    """The weights of a cache, or why they cannot be used."""
    try:
        found = ModelWeights(folder)
        found.check(quantized_model(found, quantization))
    except UserError as error:
        return None, str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}/")
    return found, next((f"{name}: content changed" for name in changed_settings(folder)), None)
