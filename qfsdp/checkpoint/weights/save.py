"""A model whose weights were trained, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import fill_quantized, streamed
from qfsdp.checkpoint.weights.merge import in_chunks, plain_config, whole_reads
from qfsdp.checkpoint.weights.output_folder import write_model_folder
from qfsdp.checkpoint.weights.write import (
    DTYPE_NAMES,
    MAX_FILE_BYTES,
    Entry,
    PlannedFile,
    SafetensorsFile,
    plan_files,
    write_files,
)
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import base_parameters
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import whole_tensor
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor


@torch.no_grad()
def save_model(
    model: Decoder,
    weights: ModelWeights,
    dtype: torch.dtype,
    folder: Path,
    world: World,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes `model` to `folder`, in place of what was there: config, tokenizer, safetensors.

    Every rank must call it, and see `folder`; each writes a part of the files. Trained weights are
    gathered one at a time. Frozen ones are those of the folder that the run loaded: exactly these
    where they are plain, though the run may have packed them for itself; dequantized where that
    folder has them packed. `config.json` comes last.

    Args:
        weights: what the run loaded.
        dtype: of everything that is written.

    Raises:
        UserError: `folder` cannot be written.
    """
    params = dict(base_parameters(model))
    trained = {name: param for name, param in params.items() if param.requires_grad}
    groups = {n: {n: Entry(DTYPE_NAMES[dtype], tuple(p.shape))} for n, p in params.items()}
    files = plan_files(groups, max_file_bytes)
    partial = folder.with_name(f"{folder.name}.partial")

    def write(mine: list[PlannedFile]) -> None:
        own = {file.name for file in mine}
        frozen = [name for file in mine for name in file.groups if name not in trained]
        cpu = torch.device("cpu")
        reads = [read for name in frozen for read in whole_reads(weights, name, cpu)]
        with streamed(reads, progress=False) as pieces:

            def fill(name: str, file: SafetensorsFile) -> None:
                if name in trained:
                    return file.write(name, whole_tensor(trained[name].to(dtype)))
                file.write_pieces(name, _frozen_rows(weights, name, pieces, dtype))

            for file in files:
                if file.name in own:
                    list(write_files(partial, [file], fill))
                    continue
                for name in filter(trained.__contains__, file.groups):
                    whole_tensor(trained[name].to(dtype))  # for the rank that writes this file

    write_model_folder(
        partial,
        files,
        write,
        weights.folder,
        lambda: plain_config(weights.folder, dtype),
        world,
    )
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def _frozen_rows(
    weights: ModelWeights, name: str, pieces: Iterator[Iterator[Tensor]], dtype: torch.dtype
) -> Iterator[Tensor]:
    """A weight of the folder, some rows at a time."""
    held: QuantizedTensor | Iterator[Tensor]
    if (stored := weights.quantized.get(name)) is None:
        held = next(pieces)
    else:
        height, width = stored.shape
        held = FORMATS[stored.format].empty(height, width, dtype, "cpu")
        fill_quantized(held, weights, stored, pieces)
    return (rows.to(dtype) for rows in in_chunks(name, held, dtype))
