"""Writes a model whose weights were trained as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from qfsdp.checkpoint.weights.convert import (
    CPU,
    WeightConversion,
    compute_rows,
    convert_folder,
    plain_config,
    read_as_quantized,
    whole_reads,
)
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.checkpoint.weights.progress import Pieces
from qfsdp.checkpoint.weights.write import DTYPE_NAMES, MAX_FILE_BYTES, Entry, SafetensorsFile
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import base_parameters
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import whole_tensor


@torch.no_grad()
def save_model(
    model: Decoder,
    weights: ModelWeights,
    dtype: torch.dtype,
    folder: Path,
    world: World,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Replaces `folder` by a model folder with the weights of `model`.

    Every rank must call it and see `folder`; each rank writes a part of the files. Trained weights
    are gathered one at a time. Frozen weights are read from the folder that the run loaded: plain
    ones unchanged, even if the run quantized them; quantized ones are dequantized.

    Args:
        weights: what the run loaded.
        dtype: of all written weights.

    Raises:
        UserError: `folder` cannot be written, or a frozen weight holds NaN or infinity.
    """
    conversions = {}
    for name, param in base_parameters(model):
        if param.requires_grad:
            conversions[name] = _trained(name, param, dtype)
        else:
            conversions[name] = _frozen(name, tuple(param.shape), weights, dtype)
    unfinished = folder.with_name(f"{folder.name}.partial")
    convert_folder(
        conversions,
        weights,
        OutputFolder(unfinished),
        plain_config(weights.folder, dtype),
        world,
        max_file_bytes,
        progress=False,
    )
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _trained(name: str, param: nn.Parameter, dtype: torch.dtype) -> WeightConversion:
    def gather() -> torch.Tensor:
        return whole_tensor(param.to(dtype))

    def write(file: SafetensorsFile, pieces: Pieces) -> None:
        file.write(name, gather())

    return WeightConversion(
        {name: Entry(DTYPE_NAMES[dtype], tuple(param.shape))}, [], write, join=gather
    )


def _frozen(
    name: str, shape: tuple[int, ...], weights: ModelWeights, dtype: torch.dtype
) -> WeightConversion:
    stored = weights.quantized.get(name)

    def write(file: SafetensorsFile, pieces: Pieces) -> None:
        if stored is None:
            rows = compute_rows(name, next(pieces), dtype)
        else:
            weight = read_as_quantized(weights, name, stored.format, dtype, CPU, pieces)
            rows = compute_rows(name, weight, dtype)
        file.write_pieces(name, (chunk.to(dtype) for chunk in rows))

    reads = whole_reads(weights, name, CPU)
    return WeightConversion({name: Entry(DTYPE_NAMES[dtype], shape)}, reads, write)
