"""Writes a merged model as one GGUF file, for llama.cpp and what is built on it.

Quantization, the file's layout and the names of tensors are those of the package `gguf`. Weights
are merged, permuted, quantized and written some rows at a time, so a model of any size fits.

llama.cpp's `llama` rotates neighbouring numbers of a head, Hugging Face's the numbers i and i +
half: rows of queries and keys are reordered for it. Rows of the other architectures are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch
from torch import Tensor

from qfsdp.checkpoint.export.gguf_metadata import GgufModel, gguf_model
from qfsdp.checkpoint.export.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
from qfsdp.checkpoint.lock import FolderLock
from qfsdp.checkpoint.saved_template import read_template
from qfsdp.checkpoint.weights.experts import of_length
from qfsdp.checkpoint.weights.merge import Merge, MergedWeight
from qfsdp.checkpoint.weights.other_names import EMBEDDINGS, HEAD
from qfsdp.checkpoint.weights.read import streamed
from qfsdp.common.errors import UserError
from qfsdp.common.files import not_written, warn_of_space, whole_file
from qfsdp.common.progress import moved
from qfsdp.distributed.world import World

if TYPE_CHECKING:
    import gguf

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
PERMUTED = re.compile(r".+\.(q|k)_proj\.(weight|bias)")


class Pieces:
    """The bytes of a tensor, made while they are written.

    `GGUFWriter.write_tensor_data` calls `tofile` and reads `nbytes` of what it is given; the
    converters of llama.cpp give it lazy tensors in the same way.
    """

    def __init__(self, nbytes: int, pieces: Iterable[Any]) -> None:
        self.nbytes, self._pieces = nbytes, pieces

    def tofile(self, file: BinaryIO) -> None:
        for piece in self._pieces:
            piece.tofile(file)
            moved()


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: its name, its type, and the weight that it is made from."""

    name: str
    type: gguf.GGMLQuantizationType
    weight: MergedWeight

    @property
    def nbytes(self) -> int:
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return prod(self.weight.shape) // block * size


@dataclass(frozen=True)
class GgufExport:
    """What is written: see `plan_gguf`.

    Fields:
        merge: the model's weights.
        type: of its matrices.
        model, tokenizer: as llama.cpp sees them.
        tensors: in the order of the file.
        template: the adapter's chat template, as `saved_template.read_template` returns it.
    """

    merge: Merge
    type: GgufType
    model: GgufModel
    tokenizer: GgufTokenizer
    tensors: list[GgufTensor]
    template: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, file: Path, world: World) -> None:
        """Writes the file on rank 0; every rank must call it. Raises UserError: on every rank: the
        folder is being written by another process, the file cannot be written, or a weight holds
        NaN or infinity."""
        with world.same_error():
            if world.rank != 0:
                return
            warn_of_space("output_dir", file.parent, self.size)
            try:
                with FolderLock(file.parent, "output_dir"), whole_file(file) as partial:
                    self._write(partial, world.device)
            except ValueError as error:
                raise UserError(f"{self.merge.weights.folder}: {error}") from None
            except OSError as error:
                raise UserError(f"output_dir: {not_written(file, error, self.size)}") from None

    def _write(self, file: Path, device: torch.device) -> None:
        import gguf
        from numpy import dtype

        writer = gguf.GGUFWriter(file, self.model.architecture)
        self.model.add_to(writer)
        kinds = gguf.LlamaFileType  # what most of the weights are
        kind = kinds.ALL_F32 if self.type == "f32" else kinds[f"MOSTLY_{self.type.upper()}"]
        writer.add_file_type(int(kind))
        self.tokenizer.add_to(writer, self.merge.weights.folder, self.template)
        factors = self.model.rope_factors()
        if factors is not None:
            fp32 = gguf.GGMLQuantizationType.F32
            data: Any = factors.numpy()
            writer.add_tensor_info("rope_freqs.weight", data.shape, data.dtype, data.nbytes, fp32)
        for tensor in self.tensors:
            shape, size = tensor.weight.shape, tensor.nbytes
            writer.add_tensor_info(tensor.name, shape, dtype("float32"), size, tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        try:
            if factors is not None:
                writer.write_tensor_data(data)
            reads = [r for t in self.tensors for r in self.merge.reads(t.weight, device)]
            with streamed(reads, progress=True) as pieces:
                for tensor in self.tensors:
                    rows = self.merge.rows(tensor.weight, device, pieces)
                    made: Any = Pieces(tensor.nbytes, self._quantized(tensor, rows))
                    writer.write_tensor_data(made)
        finally:
            writer.close()

    def _quantized(self, tensor: GgufTensor, rows: Iterator[Tensor]) -> Iterator[Any]:
        """The rows in the file's type and order, as arrays."""
        from gguf.quants import quantize
        from numpy import errstate, isfinite

        if self.model.permutes and PERMUTED.fullmatch(tensor.weight.name):
            rows = _neighbours(rows, self.model.parts.head_dim)
        for chunk in rows:
            with errstate(over="ignore"):
                made = quantize(chunk.float().cpu().numpy(), tensor.type)
            if made.dtype == "float16" and not isfinite(made).all():
                raise ValueError(f"{tensor.weight.name} has numbers too large for f16")
            yield made


def plan_gguf(merge: Merge, type: GgufType) -> GgufExport:
    """Everything about the file but the weights. Reads headers and the tokenizer only. Raises
    UserError: see `gguf_model`, `read_gguf_tokenizer` and `Merge.plan`; or the package `gguf` is
    missing."""
    try:
        import gguf
    except ImportError:
        raise UserError(
            "format: gguf needs the package gguf; expected `pip install gguf`"
        ) from None
    folder = merge.weights.folder
    model = gguf_model(folder)
    plan = merge.plan()
    if (rows := merge.weights.mean_rows) is not None:
        model = replace(model, parts=replace(model.parts, vocab_size=rows[1]))
    grown = merge.adapter if rows is not None else None  # its folder has the new tokens
    tokenizer = read_gguf_tokenizer(grown or folder, model.parts.vocab_size)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[model.architecture], model.parts.num_hidden_layers)
    tensors = []
    for weight in plan:
        name = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"{folder}: llama.cpp's {model.architecture} has no {weight.name!r}")
        tensors.append(GgufTensor(name, _type_of(weight, type), weight))
    return GgufExport(merge, type, model, tokenizer, tensors, read_template(merge.adapter))


def _type_of(weight: MergedWeight, type: GgufType) -> gguf.GGMLQuantizationType:
    """The type of a weight: fp32 for vectors; at least 8 bits for embeddings and the output layer,
    as llama.cpp's own quantizer does; 16 bits where the columns are no whole blocks."""
    import gguf

    types = gguf.GGMLQuantizationType
    if len(weight.shape) == 1:
        return types.F32
    wanted = types[type.upper()]
    if weight.name in (EMBEDDINGS, HEAD) and type[0] == "q":
        wanted = types.Q8_0
    return types.F16 if weight.shape[1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def _neighbours(rows: Iterable[Tensor], head_dim: int) -> Iterator[Tensor]:
    """Rows of queries, keys or their biases, where the rows i and i + half of every head have
    become neighbours; in pieces of a head."""
    for head in of_length(rows, head_dim):
        yield head.unflatten(0, (2, -1)).swapaxes(0, 1).flatten(0, 1)
