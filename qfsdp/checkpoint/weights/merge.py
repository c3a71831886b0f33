"""Folding LoRA, DoRA or IA3 into the weights: a model folder that needs no adapter.

    W' = W + s B A                               LoRA
    W' = magnitude / norm * (W + s B A)          DoRA; norm: of each row of W + s B A
    W' = l * W, and bias' = l * bias             IA3 of the outputs; l: one factor per row
    W' = W * l                                   IA3 of the inputs; l: one factor per column

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

from qfsdp.checkpoint.adapter_files import (
    PEFT_FIELDS,
    WEIGHTS_FILE,
    check_adapter,
    read_adapter_config,
    read_adapter_header,
)
from qfsdp.checkpoint.weights.bnb_layout import bnb_config, bnb_group, write_bnb
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import check_finite, fill_quantized, streamed
from qfsdp.checkpoint.weights.output_folder import write_model_folder
from qfsdp.checkpoint.weights.quantize import quantized_model
from qfsdp.checkpoint.weights.read import Read
from qfsdp.checkpoint.weights.write import (
    DTYPE_NAMES,
    MAX_FILE_BYTES,
    Entry,
    Group,
    PlannedFile,
    SafetensorsFile,
    plan_files,
    write_files,
)
from qfsdp.cli.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import ScaledLinear, adapted_linears, add_adapters, base_parameters
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.nf4 import BLOCK
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

Requantize = Literal["none", "nf4-bnb"]
CHUNK_WEIGHTS = 1 << 20  # merged at a time: fp32 temporaries of 4 MB
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


def scaled_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Rows of a weight, `[n, in]`, or of a bias, `[n]`, with IA3's factors folded in, fp32.

    Args:
        factors: fp32, of the same rows, `[n, 1]`, or of the inputs, `[1, in]`.
    """
    return rows.float() * (factors if rows.dim() == 2 else factors.squeeze(1))


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
            NF4; those in NF4 without an adapter keep the very bytes that they have.
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
        model = quantized_model(self.weights, self.quantization)
        self.weights.check(model)
        formats = _formats(model)
        config = read_adapter_config(self.adapter)
        add_adapters(model, config)
        check_adapter(config, self.adapter, model)
        adapted = {f"{name}.weight" for name, _ in adapted_linears(model)}
        for name, module in adapted_linears(model):
            scales_output = isinstance(module, ScaledLinear) and not module.scales_input
            if scales_output and module.bias is not None:
                adapted.add(f"{name}.bias")
        shapes = {name: tuple(param.shape) for name, param in base_parameters(model)}
        sources = {name: name for name in shapes}
        if HEAD in adapted and HEAD not in shapes:  # tied: the embeddings stay as they are
            sources[HEAD], shapes[HEAD] = EMBEDDINGS, shapes[EMBEDDINGS]
        written: dict[str, str] = {}
        if self.requantize == "nf4-bnb":
            nf4 = replace(self.quantization, format="nf4")
            written = formats or _formats(quantized_model(self.weights, nf4))
            written = {n: f if f.startswith("nf4") else "nf4" for n, f in written.items()}
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
        by_name = {weight.name: weight for weight in plan}
        write_model_folder(
            folder,
            files,
            lambda mine: self._write_files(folder, by_name, mine, world),
            self.weights.folder,
            lambda: self._model_config(plan),
            world,
        )

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
        return whole_reads(self.weights, weight.source, device)

    def _write_weight(
        self,
        weight: MergedWeight,
        pieces: Iterator[Iterator[Tensor]],
        file: SafetensorsFile,
        device: torch.device,
    ) -> None:
        held = self._held(weight, pieces, device)
        if (
            isinstance(held, QuantizedTensor)
            and held.format == weight.written
            and not weight.adapted
        ):
            return write_bnb(file, weight.name, held)
        rows = in_chunks(weight.name, held, self.base_dtype)
        if weight.adapted:
            rows = self._merged(weight.name, rows, device)
        if weight.written is not None:
            packed = self._empty(weight, weight.written, device)
            packed.quantize_(rows, weight.name)
            return write_bnb(file, weight.name, packed)
        file.write_pieces(weight.name, (chunk.to(self.dtype) for chunk in rows))

    def _held(
        self, weight: MergedWeight, pieces: Iterator[Iterator[Tensor]], device: torch.device
    ) -> QuantizedTensor | Iterator[Tensor]:
        """The base's weight as training held it: packed, or pieces of its rows."""
        if weight.held is None:
            return next(pieces)
        packed = self._empty(weight, weight.held, device)
        if (stored := self.weights.quantized.get(weight.source)) is not None:
            fill_quantized(packed, self.weights, stored, pieces)
        else:
            packed.quantize_(next(pieces), weight.name)
        return packed

    def _empty(self, weight: MergedWeight, format: str, device: torch.device) -> QuantizedTensor:
        rows, cols = weight.shape
        return FORMATS[format].empty(rows, cols, self.dtype, device)

    def _merged(self, name: str, rows: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
        """These rows, which are all of a weight's, with its adapter folded in."""
        stem, found = f"base_model.model.{name.rpartition('.')[0]}", self._adapter_tensors
        with safe_open(self.adapter / WEIGHTS_FILE, framework="pt") as file:
            tensors = {
                field: file.get_tensor(found[key][0]).to(device, torch.float32)
                for field, peft_field in PEFT_FIELDS.items()
                if (key := f"{stem}.{peft_field}") in found
            }
        # Of A and of factors of the inputs every row needs all.
        whole = {n for n, t in tensors.items() if n == "lora_A" or (n == "ia3_l" and len(t) == 1)}
        at = 0
        for chunk in rows:
            some = slice(at, at + len(chunk))
            parts = {n: t if n in whole else t[some] for n, t in tensors.items()}
            if "ia3_l" in parts:
                merged = scaled_rows(chunk, parts["ia3_l"])
            else:
                a, b, magnitude = parts["lora_A"], parts["lora_B"], parts.get("magnitude")
                merged = merged_rows(chunk, a, b, self._scaling, magnitude)
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
        config = plain_config(self.weights.folder, self.dtype)
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
    return {name: data.format for name, data in params.items() if isinstance(data, QuantizedTensor)}


def plain_config(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of a model folder, for weights that are all plain and of `dtype`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("quantization_config", "dtype"):
        config.pop(key, None)
    return config | {"torch_dtype": str(dtype).removeprefix("torch.")}  # any version reads it


def whole_reads(weights: ModelWeights, name: str, device: torch.device) -> list[Read]:
    """What is read for all rows of a weight, as it is stored: one per column of a packed one."""
    packed = weights.quantized.get(name)
    stored = [weights.plain[name]] if packed is None else packed.columns
    return [Read(tensor, range(tensor.rows), device) for tensor in stored]


def in_chunks(
    name: str, held: QuantizedTensor | Iterator[Tensor], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The numbers that training multiplied by, some rows at a time.

    Those of a plain weight are rounded to `dtype`, in which training held them.
    """
    if isinstance(held, QuantizedTensor):
        step = max(1, CHUNK_WEIGHTS // held.size(1))
        for start in range(0, held.size(0), step):
            chunk = held[start : start + step]
            assert isinstance(chunk, QuantizedTensor)
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
