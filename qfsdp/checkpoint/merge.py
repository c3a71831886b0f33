"""Folding LoRA or DoRA into the weights: a model folder that needs no adapter.

    W' = W + s B A                               LoRA
    W' = magnitude / norm * (W + s B A)          DoRA; norm: of each row of W + s B A

W is the weight that training multiplied by: dequantized where it was packed. All of it is
computed in fp32 and rounded once.

Streamed: rows are read, merged and written some megabytes at a time; what is held whole of a
weight is its packed bytes, where it has any. `config.json` comes last: an interrupted merge is no
model folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import safe_open
from torch import Tensor
from yaml import YAMLError

from qfsdp.checkpoint.bnb import bnb_config, bnb_group, write_bnb
from qfsdp.checkpoint.export import (
    PEFT_FIELDS,
    WEIGHTS_FILE,
    check_adapter,
    read_adapter_config,
    read_adapter_header,
)
from qfsdp.checkpoint.load import check_finite, fill_packed, streamed
from qfsdp.checkpoint.lock import LOCK_FILE, FolderLock
from qfsdp.checkpoint.quantize import packed_model
from qfsdp.checkpoint.safetensors_read import INDEX, Read
from qfsdp.checkpoint.safetensors_write import (
    DTYPE_NAMES,
    MAX_FILE_BYTES,
    Entry,
    Group,
    PlannedFile,
    SafetensorsFile,
    copy_companions,
    plan_files,
    write_files,
    write_index,
    write_json,
)
from qfsdp.checkpoint.sources import ModelWeights, base_parameters
from qfsdp.distributed import World
from qfsdp.errors import UserError
from qfsdp.modules.adapters import adapted_linears, add_adapters
from qfsdp.modules.packed_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.nf4 import BLOCK
from qfsdp.tensor_subclasses.packed import FORMATS, PackedTensor

Requantize = Literal["none", "nf4-bnb"]
CHUNK_WEIGHTS = 1 << 20  # merged at a time: fp32 temporaries of 4 MB
BEGUN = "qfsdp_merge.begun"  # a merge that was begun, and not finished
HEAD = "lm_head.weight"
EMBEDDINGS = "model.embed_tokens.weight"


def merged_rows(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None
) -> Tensor:
    """Rows of a weight with its adapter folded in, fp32.

    Args:
        weight: `[n, in]`, rows of the base.
        a: fp32 `[rank, in]`.
        b: fp32 `[n, rank]`, the same rows.
        scaling: of the product.
        magnitude: fp32 `[n]`, the same rows of DoRA's, or None.
    """
    merged = torch.addmm(weight.float(), b, a, alpha=scaling)
    if magnitude is None:
        return merged
    norm = torch.linalg.vector_norm(merged, dim=1).clamp_(min=torch.finfo(merged.dtype).tiny)
    return merged.mul_((magnitude / norm).unsqueeze(1))


@dataclass(frozen=True)
class MergedWeight:
    """A weight of the merged model.

    Fields:
        name: its own.
        source: the base's that it is made from: its own too, but for an untied `lm_head`.
        shape: of both.
        held: the packed format in which training held it, or None.
        written: the packed format in which it is written, or None.
        adapted: whether an adapter is folded into it.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    held: str | None
    written: str | None
    adapted: bool


@dataclass(frozen=True)
class Merge:
    """What is folded into what, and how it is written.

    Fields:
        weights, quantization, base_dtype: the base, what was packed of it in training, and what
            the rest was held in (`model.dtype`).
        adapter: its folder, in PEFT's format.
        dtype: what is written.
        requantize: "nf4-bnb": the weights that `quantization` means are written as bitsandbytes'
            NF4; those without an adapter keep the very bytes that they have.
    """

    weights: ModelWeights
    quantization: QuantizationConfig
    base_dtype: torch.dtype
    adapter: Path
    dtype: torch.dtype
    requantize: Requantize = "none"

    def plan(self) -> list[MergedWeight]:
        """The weights of the merged model. Reads headers only.

        Raises:
            UserError: the base or the adapter is not what it should be, they are not of one
                model, or a weight cannot be written as asked.
        """
        model = packed_model(self.weights, self.quantization)
        self.weights.check(model)
        formats = _formats(model)
        config = read_adapter_config(self.adapter)
        add_adapters(model, config)
        check_adapter(config, self.adapter, model)
        adapted = {f"{name}.weight" for name, _ in adapted_linears(model)}
        shapes = {name: tuple(param.shape) for name, param in base_parameters(model)}
        sources = {name: name for name in shapes}
        if HEAD in adapted and HEAD not in shapes:  # tied: the embeddings stay as they are
            sources[HEAD], shapes[HEAD] = EMBEDDINGS, shapes[EMBEDDINGS]
        written: dict[str, str] = {}
        if self.requantize == "nf4-bnb":
            nf4 = replace(self.quantization, format="nf4")
            written = formats or _formats(packed_model(self.weights, nf4))
        plan = [
            MergedWeight(n, s, shapes[n], formats.get(n), written.get(n), n in adapted)
            for n, s in sources.items()
        ]
        for weight in plan:
            if weight.written is not None and weight.shape[1] % BLOCK:
                raise UserError(
                    f"requantize: bitsandbytes packs whole blocks of {BLOCK} in a row, and "
                    f"{weight.name!r} has {weight.shape[1]} columns; requantize=none is right"
                )
        return plan

    def write(self, folder: Path, world: World, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Writes the merged model. Every rank must call it; each writes a part of the files.

        Raises:
            UserError: as `plan`; `folder` is not empty, is being written by another process or
                cannot be written; or a weight holds NaN or infinity.
        """
        plan = self.plan()
        files = plan_files({weight.name: self._group(weight) for weight in plan}, max_file_bytes)
        with FolderLock(folder, "output_dir") if world.rank == 0 else nullcontext():
            if world.rank == 0:
                _begin(folder)
            world.gather(None)  # no rank writes before the folder is there
            mine = files[world.rank :: world.size]
            self._write_files(folder, {weight.name: weight for weight in plan}, mine, world)
            world.gather(None)  # nor is it complete before all of them have written
            if world.rank == 0:
                copy_companions(self.weights.folder, folder)
                write_index(folder, files)
                write_json(folder / "config.json", self._model_config(plan))
                (folder / BEGUN).unlink()

    def _group(self, weight: MergedWeight) -> Group:
        """The tensors that a weight becomes."""
        if weight.written is not None:
            return bnb_group(weight.name, weight.written, *weight.shape)
        return {weight.name: Entry(DTYPE_NAMES[self.dtype], weight.shape)}

    def _write_files(
        self,
        folder: Path,
        plan: dict[str, MergedWeight],
        files: list[PlannedFile],
        world: World,
    ) -> None:
        names = [name for file in files for name in file.groups]
        reads = [read for name in names for read in self._reads(plan[name], world.device)]
        shown = world.rank == 0 and bool(files)
        with streamed(reads, shown) as pieces:
            try:
                for _ in write_files(
                    folder,
                    files,
                    lambda name, file: self._write_weight(plan[name], pieces, file, world.device),
                ):
                    pass
            except ValueError as error:
                raise UserError(f"{self.weights.folder}: {error}") from None

    def _reads(self, weight: MergedWeight, device: torch.device) -> list[Read]:
        packed = self.weights.packed.get(weight.source)
        stored = [self.weights.plain[weight.source]] if packed is None else packed.columns
        return [Read(tensor, range(tensor.rows), device) for tensor in stored]

    def _write_weight(
        self,
        weight: MergedWeight,
        pieces: Iterator[Iterator[Tensor]],
        file: SafetensorsFile,
        device: torch.device,
    ) -> None:
        held = self._held(weight, pieces, device)
        if isinstance(held, PackedTensor) and weight.written is not None and not weight.adapted:
            return write_bnb(file, weight.name, held)
        rows = _in_chunks(weight.name, held, self.base_dtype)
        if weight.adapted:
            rows = self._merged(weight.name, rows, device)
        if weight.written is not None:
            packed = self._empty(weight, weight.written, device)
            packed.quantize_(rows, weight.name)
            return write_bnb(file, weight.name, packed)
        at = 0
        for chunk in rows:
            file.write(weight.name, chunk.to(self.dtype), at)
            at += len(chunk)

    def _held(
        self, weight: MergedWeight, pieces: Iterator[Iterator[Tensor]], device: torch.device
    ) -> PackedTensor | Iterator[Tensor]:
        """The base's weight as training held it: packed, or pieces of its rows."""
        if weight.held is None:
            return next(pieces)
        packed = self._empty(weight, weight.held, device)
        if (stored := self.weights.packed.get(weight.source)) is not None:
            fill_packed(packed, self.weights, stored, pieces)
        else:
            packed.quantize_(next(pieces), weight.name)
        return packed

    def _empty(self, weight: MergedWeight, format: str, device: torch.device) -> PackedTensor:
        rows, cols = weight.shape
        return FORMATS[format].empty(rows, cols, self.dtype, device)

    def _merged(self, name: str, rows: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
        """These rows, which are all of a weight's, with its adapter folded in."""
        stem = f"base_model.model.{name.removesuffix('weight')}"
        found = self._adapter_tensors
        with safe_open(self.adapter / WEIGHTS_FILE, framework="pt") as file:
            a, b, magnitude = (
                file.get_tensor(found[key][0]).to(device, torch.float32) if key in found else None
                for key in (stem + field for field in PEFT_FIELDS.values())
            )
        assert a is not None and b is not None, name
        at = 0
        for chunk in rows:
            some = slice(at, at + len(chunk))
            m = None if magnitude is None else magnitude[some]
            merged = merged_rows(chunk, a, b[some], self._scaling, m)
            check_finite(f"{name} with its adapter", merged)
            yield merged
            at += len(chunk)

    @cached_property
    def _adapter_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return read_adapter_header(self.adapter)

    @cached_property
    def _scaling(self) -> float:
        return read_adapter_config(self.adapter).scaling

    def _model_config(self, plan: list[MergedWeight]) -> dict[str, Any]:
        config = json.loads((self.weights.folder / "config.json").read_text(encoding="utf-8"))
        for key in ("quantization_config", "dtype"):
            config.pop(key, None)
        config["torch_dtype"] = str(self.dtype).removeprefix("torch.")  # any version reads it
        if any(weight.name != weight.source for weight in plan):
            config["tie_word_embeddings"] = False
        formats = {weight.name: weight.written for weight in plan if weight.written is not None}
        if formats:
            linears = {w.name for w in plan if len(w.shape) == 2 and w.name != EMBEDDINGS} | {HEAD}
            skipped = sorted(name.removesuffix(".weight") for name in linears - formats.keys())
            written = next(iter(formats.values()))
            config["quantization_config"] = bnb_config(written, self.dtype, skipped)
        return config


def _formats(model: Decoder) -> dict[str, str]:
    """Weight name -> format, of the packed weights of a model."""
    params = {name: param.data for name, param in model.named_parameters()}
    return {name: data.format for name, data in params.items() if isinstance(data, PackedTensor)}


def _in_chunks(
    name: str, held: PackedTensor | Iterator[Tensor], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The numbers that training multiplied by, some rows at a time.

    Those of a plain weight are rounded to `dtype`, in which training held them.
    """
    if isinstance(held, PackedTensor):
        step = max(1, CHUNK_WEIGHTS // held.size(1))
        for start in range(0, held.size(0), step):
            chunk = held[start : start + step]
            assert isinstance(chunk, PackedTensor)
            yield chunk.dequantize(torch.float32)
        return
    for piece in held:
        check_finite(name, piece)
        step = max(1, CHUNK_WEIGHTS // max(1, piece[:1].numel()))
        for chunk in piece.split(step) if len(piece) else [piece]:
            yield chunk.to(dtype)


def warn_of_another_base(adapter: Path, base: Mapping[str, Any]) -> None:
    """Tells on standard error where the run that trained an adapter had another base.

    A run leaves its config beside its adapter; of adapters from elsewhere nothing is known. It is
    no error: some fold what was trained over 4-bit weights into those in full precision.

    Args:
        base: config key -> value, of this merge.
    """
    try:
        run = OmegaConf.load(adapter.parent / "config.yaml")
        trained = {key: OmegaConf.select(run, key) for key in base}
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return
    for key, value in trained.items():
        if value is not None and value != base[key]:
            print(
                f"warning: {key}: {base[key]!r}, but {adapter} was trained with {value!r}: the "
                "merged model is not what training ran",
                file=sys.stderr,
            )


def check_output(folder: Path) -> None:
    """Raises `UserError` if the folder holds anything but an unfinished merge."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir: '{folder}' is a file; name a new folder")
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if files - {LOCK_FILE} and BEGUN not in files:
        raise UserError(f"output_dir: '{folder}' is not empty; name a new folder")


def _begin(folder: Path) -> None:
    """Marks the folder, and removes what an interrupted merge, maybe of something else, left."""
    check_output(folder)
    write_json(folder / BEGUN, {})
    left = [*folder.glob("*.partial"), *folder.glob("model*.safetensors")]
    for file in (folder / "config.json", folder / INDEX, *left):
        file.unlink(missing_ok=True)
