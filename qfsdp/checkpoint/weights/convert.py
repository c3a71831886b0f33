"""One model folder into another: the loop that quantize, merge, expand and save share.

Streamed: rows are read ahead in pieces of 16 MB, converted, and written where they belong, so a
rank holds at most one weight. Every command says how each weight is made (`WeightConversion`);
`convert_folder` lays the tensors out in files and shares the files out among the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfsdp.checkpoint.lock import FolderLock
from qfsdp.checkpoint.weights.experts import StoredAs
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import check_finite, fill_quantized
from qfsdp.checkpoint.weights.other_names import PREDICTOR
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.checkpoint.weights.read import Pieces, Read, StackedTensor, StoredTensor, streamed
from qfsdp.checkpoint.weights.verify import verified
from qfsdp.checkpoint.weights.write import (
    Group,
    PlannedFile,
    SafetensorsFile,
    copy_companions,
    plan_files,
    write_file,
    write_index,
)
from qfsdp.common.errors import UserError
from qfsdp.common.files import not_written, warn_of_space, write_text
from qfsdp.distributed.world import World
from qfsdp.modules.hub_models.config import HubConfig
from qfsdp.modules.kept_fp32 import KEPT_FP32
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

CHUNK_NUMBERS = 1 << 20  # numbers per chunk: fp32 temporaries of 4 MB
CPU = torch.device("cpu")


@dataclass(frozen=True)
class WeightConversion:
    """How one weight of the new folder is made.

    Fields:
        tensors: the tensors that the weight is stored as; they stay in one file.
        reads: the stored rows that it is made from.
        write: `write(file, pieces)` writes `tensors`, from the pieces of `reads`. It raises
            ValueError for a number that cannot be converted.
        join: where `write` needs all ranks, called by the ranks that write another file.
    """

    tensors: Group
    reads: Sequence[Read]
    write: Callable[[SafetensorsFile, Pieces], None]
    join: Callable[[], object] | None = None


def convert_folder(
    conversions: Mapping[str, WeightConversion],
    source: ModelWeights,
    output: OutputFolder,
    config: dict[str, Any],
    world: World,
    max_file_bytes: int,
    progress: bool = True,
) -> None:
    """Writes a model folder. Every rank must call it and see the folder; each rank writes a part
    of the files.

    Args:
        conversions: by the weight's name in the new model.
        source: the model that is converted; its tokenizer and other companions are copied.
        config: the new `config.json`, written after the weights.
        progress: show a bar on rank 0.

    Raises:
        UserError: on every rank: the output folder holds something else, is being written by
            another process or cannot be written; or a weight holds NaN or infinity.
    """
    groups = {name: conversion.tensors for name, conversion in conversions.items()}
    files, folder = plan_files(groups, max_file_bytes), output.path
    known: dict[str, str] = {}
    finished = False
    with ExitStack() as held:
        with _same_error(world, source, output):
            if world.rank == 0:
                held.enter_context(FolderLock(folder, output.key, wait=output.waits))
                finished = output.is_finished()
                known = {} if finished else output.begin()
        if world.broadcast(finished):
            return
        try:
            known = world.broadcast(known)
            _write_all(conversions, files, known, source, output, config, world, progress)
        except UserError:
            if world.rank == 0:
                output.abandon()
            raise


def _write_all(
    conversions: Mapping[str, WeightConversion],
    files: Sequence[PlannedFile],
    known: Mapping[str, str],
    source: ModelWeights,
    output: OutputFolder,
    config: dict[str, Any],
    world: World,
    progress: bool,
) -> None:
    """Writes everything to the folder that rank 0 has begun.

    Args:
        known: file name -> SHA-256, of files that an earlier conversion wrote.
    """
    folder = output.path
    mine = files[world.rank :: world.size]
    todo = [file for file in mine if not output.is_done(file, known.get(file.name))]
    size = sum(world.gather(sum(file.size for file in todo)))
    if world.rank == 0:
        warn_of_space(output.key, folder, size)
    shown = progress and world.rank == 0 and bool(todo)
    done: set[str] = set()
    with _same_error(world, source, output):
        try:
            with verified(source.folder, source.weight_files):
                _write_weights(conversions, folder, files, {f.name for f in todo}, done, shown)
        except (UserError, ValueError, OSError) as error:
            if isinstance(error, UserError):  # the source may be damaged, and what is made of it
                for file in todo:
                    (folder / file.name).unlink(missing_ok=True)
            _join_others(conversions, done)
            raise
    parts = world.gather(output.checksums(mine))
    with _same_error(world, source, output):  # no rank opens the folder before it is complete
        if world.rank == 0:
            copy_companions(source.folder, folder)
            for name, text in output.texts.items():
                write_text(folder / name, text)
            write_index(folder, files)
            # The Python files that `auto_map` names are not copied.
            known_config = {key: value for key, value in config.items() if key != "auto_map"}
            # Nemotron-H's has Infinity, which `write_json` would make null.
            write_text(folder / "config.json", json.dumps(known_config, indent=2) + "\n")
            output.finish({name: digest for part in parts for name, digest in part.items()})


@contextmanager
def _same_error(world: World, source: ModelWeights, output: OutputFolder) -> Iterator[None]:
    """A part that every rank does; an error of any rank is raised on every rank, as a UserError."""
    with world.same_error():
        try:
            yield
        except ValueError as error:
            raise UserError(f"{source.folder}: {error}") from None
        except OSError as error:
            raise UserError(f"{output.key}: {not_written(output.path, error)}") from None


def _write_weights(
    conversions: Mapping[str, WeightConversion],
    folder: Path,
    files: Sequence[PlannedFile],
    mine: set[str],
    done: set[str],
    progress: bool,
) -> None:
    """Writes the files named in `mine`, and joins the conversions in the others. Adds the name of
    every weight to `done` as its turn comes."""
    names = [name for file in files if file.name in mine for name in file.groups]
    reads = [read for name in names for read in conversions[name].reads]

    with streamed(reads, progress) as pieces:

        def write(name: str, file: SafetensorsFile) -> None:
            done.add(name)
            conversions[name].write(file, pieces)

        for planned in files:
            if planned.name in mine:
                write_file(folder, planned, write)
                continue
            for name in planned.groups:
                done.add(name)
                if (join := conversions[name].join) is not None:
                    join()


def _join_others(conversions: Mapping[str, WeightConversion], done: set[str]) -> None:
    """After an error on this rank: has its part in the conversions of other ranks that follow."""
    for name, conversion in conversions.items():
        if name not in done and conversion.join is not None:
            with suppress(UserError):  # the first error counts
                conversion.join()


# ---- conversions and their parts -----------------------------------------------------------------


def copied(name: str, stored: StoredTensor, target: StoredAs) -> WeightConversion:
    """A plain tensor, written as `target` says with the bytes that it has."""

    def write(file: SafetensorsFile, pieces: Pieces) -> None:
        target.write(file, _checked(name, next(pieces)))

    reads = [Read(stored, range(stored.rows), CPU)]
    return WeightConversion(target.group(stored.dtype), reads, write)


def copies_but(source: ModelWeights, written: Collection[str]) -> dict[str, WeightConversion]:
    """All tensors of a folder with their bytes, but for those named in `written`."""
    return {
        name: copied(name, stored, StoredAs({name: stored.shape}))
        for name, stored in source.tensors.items()
        if name not in written
    }


def keeps_tensors(config: Any) -> bool:
    """Whether a folder is written with the tensors that were read, where training changed none: of
    a model of transformers, and of one that takes more than text."""
    return isinstance(config, HubConfig) or bool(config and config.takes_more_than_text)


def copies_beside(source: ModelWeights, written: Collection[str]) -> dict[str, WeightConversion]:
    """All tensors that are copied beside those `written`: where a folder is written anew, those
    that predict further tokens."""
    if not keeps_tensors(source.config):
        written = {name for name in source.tensors if not PREDICTOR.match(name)}
    return copies_but(source, written)


def stored_whole(source: ModelWeights, name: str) -> StoredAs:
    """The tensors of the folder that hold a plain parameter; it may be a part of one."""
    found = source.plain[name]
    parts = found.parts if isinstance(found, StackedTensor) else (found,)
    shapes = {part.name: source.tensors[part.name].shape for part in parts}
    return StoredAs(shapes, isinstance(found, StackedTensor) and found.transposed)


def _checked(name: str, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    for piece in pieces:
        check_finite(name, piece)
        yield piece


def whole_reads(source: ModelWeights, name: str, device: torch.device) -> list[Read]:
    """Reads of all rows of a weight as it is stored: one per column of a quantized weight."""
    quantized = source.quantized.get(name)
    stored = [source.plain[name]] if quantized is None else quantized.columns
    return [Read(tensor, range(tensor.rows), device) for tensor in stored]


def read_as_quantized(
    source: ModelWeights,
    name: str,
    format: str,
    dtype: torch.dtype,
    device: torch.device,
    pieces: Pieces,
) -> QuantizedTensor:
    """A whole weight in a quantized format: its stored bytes, or quantized if it is plain.

    Args:
        dtype: the compute dtype that it stands for.
        pieces: of `whole_reads`.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    stored = source.quantized.get(name)
    rows, cols = source.plain[name].shape if stored is None else stored.shape
    weight = FORMATS[format].empty(rows, cols, dtype, device)
    if stored is None:
        weight.quantize_(next(pieces), name)
    else:
        fill_quantized(weight, source, stored, pieces)
    return weight


def compute_rows(
    name: str, weight: QuantizedTensor | Iterator[Tensor], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The numbers that training multiplies by, in chunks of rows.

    Args:
        weight: quantized (its rows come in fp32), or the pieces of a plain one.
        dtype: that training holds plain weights in; they are rounded to it.
    """
    if isinstance(weight, QuantizedTensor):
        step = max(1, CHUNK_NUMBERS // weight.size(1))
        for start in range(0, weight.size(0), step):
            chunk = weight[start : start + step]
            assert isinstance(chunk, QuantizedTensor)
            yield chunk.dequantize(torch.float32)
        return
    for piece in _checked(name, weight):
        step = max(1, CHUNK_NUMBERS // max(1, piece[:1].numel()))
        for chunk in piece.split(step) if len(piece) else [piece]:
            yield chunk.to(dtype_of(name, dtype))


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter of a model of `dtype`. A router's correction is fp32 in all of them:
    in bf16 its steps near 7, 1/32, would make the corrections of many experts the same. So are the
    decays of recurrent layers."""
    return torch.float32 if name.rpartition(".")[2] in KEPT_FP32 else dtype


def plain_config(folder: Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The `config.json` of a model folder, with all weights plain and of `dtype`.

    Args:
        dtype: None: the weights keep theirs. Those that are stored in FP8 are written in bf16.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config")):  # which vLLM and a model of text alone read
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            if dtype is not None:
                part.pop("dtype", None)
                part["torch_dtype"] = str(dtype).removeprefix("torch.")  # any version reads it
    return config
