"""The tensors of a folder by the names of transformers' parameters, read by rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.weights.fp8_layout import FP8_METHODS
from qfsdp.checkpoint.weights.read import ComputedTensor, StackedTensor, StoredTensor
from qfsdp.common.errors import UserError
from qfsdp.modules.hub_models.config import HubConfig
from qfsdp.modules.hub_models.experts import stacked_experts
from qfsdp.modules.hub_models.linears import transposed_weights
from qfsdp.modules.hub_models.names import Source, parameter_sources
from qfsdp.modules.hub_models.text_part import used_names


def tensors_of_hub_model(
    tensors: Mapping[str, StoredTensor], folder: Path, config: HubConfig, quantization: Any
) -> dict[str, StoredTensor]:
    """Parameter name -> the rows that hold it; tensors of no parameter keep their names.

    Args:
        tensors: of the folder, as they are read.
        quantization: its `quantization_config`; None if they are plain or FP8.

    Raises:
        UserError: the folder is quantized, or a tensor is stored in a form that is not read.
    """
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UserError(
            f"{config.source}: quantization_config ({method}); expected {FP8_METHODS}, or plain "
            f"weights: {config.architecture} is quantized while it is loaded"
        )
    shapes = {name: tuple(param.shape) for name, param in config.meta.state_dict().items()}
    names = used_names(config)
    sources = parameter_sources(config.meta, tensors, str(folder), names)
    found = {name: _rows(name, one, shapes.get(name), tensors) for name, one in sources.items()}
    for name, param in stacked_experts(config.meta):
        if name in found:
            stored = found.pop(name)
            shape = stored.shape if stored.shape != tuple(param.shape) else _flat(stored.shape)
            found[f"{name}.weight"] = replace(stored, shape=shape)
    for name in found.keys() & set(transposed_weights(config.meta)):
        found[name] = StackedTensor.of(name, [found[name]], transposed=True)
    return found


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the rows of all experts, `[experts, out, in]` -> `[experts * out, in]`."""
    return (shape[0] * shape[1], *shape[2:])


def _rows(
    name: str, source: Source, shape: tuple[int, ...] | None, tensors: Mapping[str, StoredTensor]
) -> StoredTensor:
    parts = [tensors[one] for one in source.names]
    first = parts[0]
    if (source.parts > 1 or source.transposed) and isinstance(first, ComputedTensor):
        raise UserError(
            f"{first.file}: {name!r} is a part of tensor {first.name!r}; expected it in 16 bits"
        )
    if source.parts > 1:
        rows, size = first.rows // source.parts, first.size // source.parts
        start = first.start + source.part * size
        return replace(first, shape=(rows, *first.shape[1:]), start=start, size=size)
    if source.transposed and first.shape != shape:
        experts, rows, cols = first.shape
        return replace(StackedTensor.of_transposed(name, first), shape=(experts, cols, rows))
    if len(parts) == 1:
        return replace(first, shape=first.shape or (1,))
    for part in parts:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise UserError(
                f"{part.file}: tensor {part.name!r} is {part.dtype} {list(part.shape)}; expected "
                f"{first.dtype} {list(first.shape)}, as {first.name!r} is"
            )
    stacked = StackedTensor.of(name, parts)
    if shape is not None and prod(shape) == prod(stacked.shape):
        return replace(stacked, shape=shape)
    return stacked
