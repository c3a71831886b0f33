"""Writes a model whose weights were trained as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qfsdp.checkpoint.weights.convert import (
    CPU,
    WeightConversion,
    convert_folder,
    copies_beside,
    copies_but,
    keeps_tensors,
    plain_config,
    stored_whole,
)
from qfsdp.checkpoint.weights.experts import StoredAs, stored_as
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import check_finite
from qfsdp.checkpoint.weights.merge import Merge, MergedWeight
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.checkpoint.weights.read import Pieces
from qfsdp.checkpoint.weights.write import DTYPE_NAMES, MAX_FILE_BYTES, SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.common.files import PARTIAL, not_written, recover_folder, replace_folder
from qfsdp.distributed.world import World
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.hub_models.decoder import AnyDecoder, HubDecoder
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.dtensor import whole_tensor


@torch.no_grad()
def save_model(
    model: AnyDecoder,
    weights: ModelWeights,
    dtype: torch.dtype,
    folder: Path,
    world: World,
    max_file_bytes: int = MAX_FILE_BYTES,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Replaces `folder` by a model folder with the weights of `model`.

    Every rank must call it and see `folder`; each rank writes a part of the files. Trained weights
    are gathered one at a time. Frozen weights are read from the folder that the run loaded: plain
    ones unchanged, even if the run quantized them; quantized ones are dequantized. Of a model of
    transformers all other tensors keep their bytes, also those that it does not read.

    Args:
        weights: what the run loaded.
        dtype: of all written weights; of a model of transformers, of the trained ones.
        texts: name -> text of files that replace the base's, such as the chat template.

    Raises:
        UserError: on every rank: `folder` cannot be written, or a weight holds NaN or infinity. The
            earlier `folder` is then unchanged.
    """
    hub = isinstance(model, HubDecoder) or keeps_tensors(model.config)
    conversions = (_of_hub_model if hub else _of_decoder)(model, weights, dtype)
    unfinished = folder.with_name(folder.name + PARTIAL)
    if world.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed here
    try:
        convert_folder(
            conversions,
            weights,
            OutputFolder(unfinished, texts=texts or {}),
            plain_config(weights.folder, dtype),
            world,
            max_file_bytes,
            progress=False,
        )
        with world.same_error():
            if world.rank == 0:
                try:
                    replace_folder(unfinished, folder)
                except OSError as error:
                    raise UserError(not_written(folder, error)) from None
    except UserError:
        if world.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            recover_folder(folder)
        raise


def _of_decoder(
    model: Any, weights: ModelWeights, dtype: torch.dtype
) -> dict[str, WeightConversion]:
    """Every weight as files of the model's family have it."""
    conversions = {}
    frozen = Merge(weights, QuantizationConfig("none"), dtype, adapter=None, dtype=dtype)
    for name, param in base_parameters(model):
        shape = tuple(param.shape)
        target = stored_as(name, shape, model.config)
        if param.requires_grad:
            conversions[name] = _trained([(name, param)], dtype, target)
        else:
            held = weights.quantized[name].format if name in weights.quantized else None
            weight = MergedWeight(name, name, shape, held, None, False, target)
            conversions[name] = frozen.conversion(weight, CPU)
    return conversions | copies_beside(weights, ())


def _of_hub_model(
    model: AnyDecoder, weights: ModelWeights, dtype: torch.dtype
) -> dict[str, WeightConversion]:
    """Trained weights in the tensors that held them, and all other tensors with their bytes."""
    trained = {n: p for n, p in base_parameters(model) if p.requires_grad}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in trained:
        groups.setdefault(tuple(stored_whole(weights, name).shapes), []).append(name)
    conversions: dict[str, WeightConversion] = {}
    for names in groups.values():  # several, if they are parts of one tensor
        names.sort(key=lambda name: weights.plain[name].start)
        held = [(name, trained[name]) for name in names]
        conversions[names[0]] = _trained(held, dtype, stored_whole(weights, names[0]))
    written = {name for group in groups for name in group}
    others = model.other_names if isinstance(model, HubDecoder) else {}
    for name, first in others.items():  # stored twice, and trained as one
        if first in trained and name in weights.plain:
            written |= stored_whole(weights, name).shapes.keys()
    return conversions | copies_but(weights, written)


def _trained(
    parts: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype, target: StoredAs
) -> WeightConversion:
    """
    Args:
        parts: (name, parameter), whose rows follow each other in `target`.
    """

    def gather() -> torch.Tensor:
        found = []
        for name, param in parts:
            found.append(whole_tensor(param.to(dtype)))
            try:
                check_finite(name, found[-1])
            except ValueError as error:  # on every rank: each has the whole weight
                raise UserError(f"the trained model is not written: {error}") from None
        whole = torch.cat(found) if len(found) > 1 else found[0]
        return whole.reshape(-1, *target.row_shape)

    def write(file: SafetensorsFile, pieces: Pieces) -> None:
        target.write(file, [gather()])

    return WeightConversion(target.group(DTYPE_NAMES[dtype]), [], write, join=gather)
