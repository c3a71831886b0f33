"""The tensors of a folder by the names of transformers' parameters, read by rows."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from qfsdp.checkpoint.weights.read import SafetensorsFolder, StackedTensor, StoredTensor
from qfsdp.common.errors import UserError
from qfsdp.modules.hub_models.config import HubConfig
from qfsdp.modules.hub_models.names import Source, parameter_sources
from qfsdp.modules.hub_models.text_part import used_names


def tensors_of_hub_model(files: SafetensorsFolder, config: HubConfig) -> dict[str, StoredTensor]:
    """Parameter name -> the rows that hold it; tensors of no parameter keep their names.

    Raises:
        UserError: the folder is quantized, or a tensor is stored in a form that is not read.
    """
    if (quantized := getattr(config.hf, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{config.source}: quantization_config ({method}); expected weights in 16 or 32 bits: "
            f"{config.architecture} is quantized while it is loaded"
        )
    shapes = {name: tuple(param.shape) for name, param in config.meta.state_dict().items()}
    names = used_names(config)
    sources = parameter_sources(config.meta, files.tensors, str(files.folder), names)
    return {name: _rows(name, source, shapes.get(name), files) for name, source in sources.items()}


def _rows(
    name: str, source: Source, shape: tuple[int, ...] | None, files: SafetensorsFolder
) -> StoredTensor:
    parts = [files.tensors[one] for one in source.names]
    first = parts[0]
    if source.parts > 1:
        rows, size = first.rows // source.parts, first.size // source.parts
        start = first.start + source.part * size
        return replace(first, shape=(rows, *first.shape[1:]), start=start, size=size)
    if len(parts) == 1:
        return first
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
