"""Writes a merged model as one GGUF file, for llama.cpp and what is built on it.

Quantization, the file's layout and the names of tensors are those of the package `gguf`. Weights
are merged, quantized, reordered and written some rows at a time, so a model of any size fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qfsdp.checkpoint.export.gguf_metadata import GgufModel, gguf_model
from qfsdp.checkpoint.export.gguf_tensors import GgufTensor, GgufType, Layout
from qfsdp.checkpoint.export.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
from qfsdp.checkpoint.lock import FolderLock
from qfsdp.checkpoint.saved_template import read_template
from qfsdp.checkpoint.weights.merge import Merge
from qfsdp.checkpoint.weights.read import streamed
from qfsdp.common.errors import UserError
from qfsdp.common.files import not_written, warn_of_space, whole_file
from qfsdp.common.progress import moved
from qfsdp.distributed.world import World


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
            name, size, numbers = tensor.name, tensor.nbytes, dtype("float32")
            writer.add_tensor_info(name, tensor.shape, numbers, size, tensor.type)
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
                    made: Any = Pieces(tensor.nbytes, tensor.arrays(rows))
                    writer.write_tensor_data(made)
        finally:
            writer.close()


def plan_gguf(merge: Merge, type: GgufType) -> GgufExport:
    """Everything about the file but the weights. Reads headers and the tokenizer only. Raises
    UserError: see `gguf_model`, `read_gguf_tokenizer` and `Merge.plan`; or the package `gguf` is
    missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            "format: gguf needs the package gguf; expected `pip install gguf`"
        ) from None
    folder = merge.weights.folder
    model = gguf_model(folder)
    plan = merge.plan(all_weights=True)
    if (rows := merge.weights.mean_rows) is not None:
        model = replace(model, parts=replace(model.parts, vocab_size=rows[1]))
    tokenizer = read_gguf_tokenizer(merge.tokenizer_folder, model.parts.vocab_size, folder)
    layout = Layout(model, type)
    tensors = [tensor for weight in plan for tensor in layout.tensors(weight)]
    return GgufExport(merge, type, model, tokenizer, tensors, read_template(merge.adapter))
