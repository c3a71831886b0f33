"""The tensors of a folder by the names of the model that is built: ours, or transformers'.

And which of two equal tensors is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from qfsdp.checkpoint.weights.fp8_layout import FP8_METHODS
from qfsdp.checkpoint.weights.read import (
    PIECE_BYTES,
    STORED_DTYPES,
    ComputedTensor,
    OpenFiles,
    StackedTensor,
    StoredTensor,
)
from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import DecoderParts
from qfsdp.modules.hub_models.config import HubConfig
from qfsdp.modules.hub_models.experts import stacked_experts
from qfsdp.modules.hub_models.linears import transposed_weights
from qfsdp.modules.hub_models.names import Source, parameter_sources
from qfsdp.modules.hub_models.text_part import used_names

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PREDICTOR = re.compile(r"(model\.)?mtp\.")  # layers that predict more tokens


def with_our_names(
    tensors: dict[str, StoredTensor], parts: DecoderParts
) -> dict[str, StoredTensor]:
    """The same tensors, where those that transformers reads under other names have ours.

    A model that was saved without its output layer has no `model.`; transformers 5 has Mixtral's
    mixtures at `mlp`; the text of a whole Qwen 3.5 may be read alone; and a tied weight may stand
    at either of its places.
    """
    bare = any(n.startswith("layers.") for n in tensors) and EMBEDDINGS not in tensors
    found = {}
    for name, tensor in tensors.items():
        if bare and not name.startswith(("model.", "lm_head.", "mtp.")):
            name = f"model.{name}"
        if parts.experts is not None and parts.mlp.module != "mlp":
            name = name.replace(".mlp.", f".{parts.mlp.module}.")
        if parts.recurrent is not None and not parts.takes_more_than_text:
            name = name.replace("model.language_model.", "model.")
        found[name] = tensor
    embeddings = f"{parts.body}.embed_tokens.weight"
    if parts.tie_word_embeddings and embeddings not in found and HEAD in found:
        found[embeddings] = found.pop(HEAD)
    return found


def same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers, in the narrower of their dtypes."""
    if a.shape != b.shape:
        return False
    narrow = min((STORED_DTYPES[t.dtype] for t in (a, b)), key=lambda dtype: dtype.itemsize)
    step = max(1, PIECE_BYTES // max(1, a.row_bytes))
    with closing(OpenFiles()) as files:
        for start in range(0, a.rows, step):
            rows = min(step, a.rows - start)
            pieces = [torch.empty(rows, *t.shape[1:], dtype=STORED_DTYPES[t.dtype]) for t in (a, b)]
            for tensor, piece in zip((a, b), pieces, strict=True):
                files.read_rows(tensor, start, piece)
            if not torch.equal(*(piece.to(narrow) for piece in pieces)):
                return False
    return True


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
            if stored.shape == tuple(param.shape):  # [experts, out, in]
                stored = replace(stored, shape=(prod(stored.shape[:2]), *stored.shape[2:]))
            found[f"{name}.weight"] = stored
    for name in found.keys() & set(transposed_weights(config.meta)):
        found[name] = StackedTensor.of(name, [found[name]], transposed=True)
    return found


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
            expected = f"{first.dtype} {list(first.shape)}, as {first.name!r} is"
            raise part.wrong(f"is {part.dtype} {list(part.shape)}; expected {expected}")
    stacked = StackedTensor.of(name, parts)
    if shape is not None and prod(shape) == prod(stacked.shape):
        return replace(stacked, shape=shape)
    return stacked
