"""Merges adapters into the weights: a model folder that needs no adapter.

    W' = W + s B A                               LoRA
    W' = magnitude / norm * (W + s B A)          DoRA; norm: of each row of W + s B A
    W' = l * W, and bias' = l * bias             IA3 of the outputs; l: one factor per row
    W' = W * l                                   IA3 of the inputs; l: one factor per column
    W' = W + [D^T D^T ... ],  W' = W R^T         MiSS, OFT
    W' = the adapter's weight                    modules trained as a whole

W is the weight that training multiplied by: dequantized if it was quantized. The merge is computed
in fp32 and rounded once. Rows are read, merged and written some megabytes at a time; only a
quantized weight's bytes are held as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from qfsdp.checkpoint.adapter_files import (
    PEFT_FIELDS,
    WEIGHTS_FILE,
    read_adapter_config,
    read_adapter_header,
)
from qfsdp.checkpoint.expert_adapter_files import StoredTensor
from qfsdp.checkpoint.saved_template import model_template, read_template
from qfsdp.checkpoint.weights.bnb_layout import bnb_config, bnb_group, write_bnb
from qfsdp.checkpoint.weights.convert import (
    WeightConversion,
    compute_rows,
    convert_folder,
    copies_beside,
    dtype_of,
    keeps_tensors,
    plain_config,
    read_as_quantized,
    stored_whole,
    whole_reads,
)
from qfsdp.checkpoint.weights.experts import PARAMETER, StoredAs, stored_as
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import check_finite
from qfsdp.checkpoint.weights.other_names import EMBEDDINGS, HEAD
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.checkpoint.weights.quantize import (
    adapted_model,
    quantized_model,
    quantized_weights,
)
from qfsdp.checkpoint.weights.read import Pieces, Read
from qfsdp.checkpoint.weights.write import DTYPE_NAMES, MAX_FILE_BYTES, Group, SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import ScaledLinear
from qfsdp.modules.adapters.miss import merged_blocks
from qfsdp.modules.adapters.oft import merged_rotations
from qfsdp.modules.adapters.trained_rows import DELTA, trained_rows, with_trained
from qfsdp.modules.adapters.whole import KEY, whole_parameters
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.low_rank.adapted import adapted_linears
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

Requantize = Literal["none", "nf4-bnb"]
Held = QuantizedTensor | Iterator[Tensor]  # the base's weight as training held it


def merged_rows(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None
) -> Tensor:
    """Rows of a weight merged with their LoRA or DoRA adapter, fp32 `[n, in]`.

    Args:
        weight: `[n, in]`, rows of the base.
        a: fp32 `[rank, in]`.
        b: fp32 `[n, rank]`, the same rows.
        scaling: factor of B A.
        magnitude: fp32 `[n]`, the same rows of DoRA's magnitude; None for LoRA.
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
        name: its name in the merged model.
        source: its name in the base; differs only for an `lm_head` that was tied.
        shape: its shape.
        held: the quantized format in which training held it, or None.
        written: the quantized format in which it is written, or None.
        adapted: whether it has an adapter.
        stored: how it is written if it is plain.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    held: str | None
    written: str | None
    adapted: bool
    stored: StoredAs


@dataclass(frozen=True)
class Merge:
    """A base, an adapter, and how the merged model is written.

    Fields:
        weights: the base.
        quantization: of the base in training.
        base_dtype: of the other base weights in training (`model.dtype`).
        adapter: a folder in PEFT's format. None: the base's weights, dequantized.
        dtype: of the written weights.
        requantize: "nf4-bnb" writes the weights that `quantization` targets as bitsandbytes' NF4;
            those in NF4 without an adapter keep their bytes.
    """

    weights: ModelWeights
    quantization: QuantizationConfig
    base_dtype: torch.dtype
    adapter: Path | None
    dtype: torch.dtype
    requantize: Requantize = "none"

    def plan(self, all_weights: bool = False) -> list[MergedWeight]:
        """The weights of the merged model. Reads headers only.

        Args:
            all_weights: those too that a folder is written with as they were read, where a model
                takes more than text.

        Raises:
            UserError: the base or the adapter is broken, they belong to different models, or a
                weight cannot be written as `requantize` asks.
        """
        if self.adapter is not None:
            model = adapted_model(self.weights, self.quantization, self.adapter)
        else:
            model = quantized_model(self.weights, self.quantization)
            self.weights.check(model)
        formats = _formats(model)
        adapted = _adapted(model) | {key.removeprefix(KEY) for key in whole_parameters(model)}
        adapted |= {f"{name}.weight" for name, _ in trained_rows(model)}
        shapes = {name: tuple(param.shape) for name, param in base_parameters(model)}
        if keeps_tensors(model.config) and not all_weights:
            return self._changed(formats, adapted, shapes)
        sources = {name: name for name in shapes}
        if HEAD in adapted and HEAD not in shapes:  # tied: the embeddings are not merged
            sources[HEAD], shapes[HEAD] = EMBEDDINGS, shapes[EMBEDDINGS]
        written: dict[str, str] = {}
        if self.requantize == "nf4-bnb":
            nf4 = replace(self.quantization, format="nf4")
            written = formats or _formats(quantized_model(self.weights, nf4))
            written = {n: f if f.startswith("nf4") else "nf4" for n, f in written.items()}
        plan = []
        for name, source in sources.items():
            shape, held, format = shapes[name], formats.get(name), written.get(name)
            if format is not None and PARAMETER.fullmatch(name):
                raise UserError(
                    f"requantize: nf4-bnb has no form for the experts of a mixture ({name!r}); "
                    "expected requantize=none"
                )
            if format is not None and shape[1] % BLOCK:
                raise UserError(
                    f"requantize: nf4-bnb stores whole blocks of {BLOCK} columns, and {name!r} has "
                    f"{shape[1]} columns; expected requantize=none"
                )
            stored = stored_as(name, shape, model.config)
            plan.append(MergedWeight(name, source, shape, held, format, name in adapted, stored))
        return plan

    def _changed(
        self, formats: dict[str, str], adapted: set[str], shapes: dict[str, tuple[int, ...]]
    ) -> list[MergedWeight]:
        """The weights of a model of transformers that training did not hold as they are stored."""
        if self.requantize != "none":
            raise UserError(
                f"requantize: {self.requantize}; expected none: a model of transformers is "
                "quantized while it is loaded"
            )
        if shared := sorted(adapted - shapes.keys()):
            raise UserError(
                f"{self.adapter}: adapts {shared[0]!r}, which this model shares with its "
                "embeddings; expected an adapter of other linears"
            )
        plan = []
        for name in sorted(formats.keys() | adapted):
            one, held = stored_whole(self.weights, name), formats.get(name)
            if sum(map(prod, one.shapes.values())) != prod(shapes[name]):
                file = self.weights.plain[name].file
                raise UserError(f"{file}: {name!r} is a part of a tensor; it is not merged")
            plan.append(MergedWeight(name, name, shapes[name], held, None, name in adapted, one))
        return plan

    def write(
        self,
        folder: Path,
        world: World,
        max_file_bytes: int = MAX_FILE_BYTES,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Writes the merged model. Every rank must call it; each rank writes a part of the files.

        Args:
            texts: name -> text of further files, such as a model card.

        Raises:
            UserError: see `plan` and `convert_folder`.
        """
        plan = self.plan()
        conversions = {weight.name: self.conversion(weight, world.device) for weight in plan}
        conversions |= copies_beside(self.weights, {n for w in plan for n in w.stored.shapes})
        config = self.model_config(plan)
        output = OutputFolder(folder, texts=self.texts() | dict(texts or {}))
        convert_folder(conversions, self.weights, output, config, world, max_file_bytes)

    @property
    def tokenizer_folder(self) -> Path:
        """Where the model's tokenizer is: beside the adapter if that has new tokens."""
        grown = None if self.weights.mean_rows is None else self.adapter
        return grown or self.weights.folder

    def texts(self) -> dict[str, str]:
        """The files that replace those of the base: chat template, new tokens; name -> text."""
        grown = self.tokenizer_folder == self.adapter
        template = read_template(self.adapter, tokenizer=grown)
        return model_template(template, self.weights.folder, self.tokenizer_folder)

    def conversion(self, weight: MergedWeight, device: torch.device) -> WeightConversion:
        """How a weight of `plan` is made."""
        tensors: Group = weight.stored.group(DTYPE_NAMES[dtype_of(weight.name, self.dtype)])
        if weight.written is not None:
            tensors = bnb_group(weight.name, weight.written, *weight.shape)
        write = partial(self._write_weight, weight, device)
        return WeightConversion(tensors, self.reads(weight, device), write)

    def reads(self, weight: MergedWeight, device: torch.device) -> list[Read]:
        """The stored rows that a weight is made from."""
        return whole_reads(self.weights, weight.source, device)

    def rows(self, weight: MergedWeight, device: torch.device, pieces: Pieces) -> Iterator[Tensor]:
        """All rows of a merged weight in chunks, not yet rounded to `dtype`.

        Args:
            pieces: of `reads`.
        """
        return self._rows(weight, self._held(weight, device, pieces), device)

    def _held(self, weight: MergedWeight, device: torch.device, pieces: Pieces) -> Held:
        if weight.held is None:
            return next(pieces)
        name, format = weight.source, weight.held
        return read_as_quantized(self.weights, name, format, self.dtype, device, pieces)

    def _rows(self, weight: MergedWeight, held: Held, device: torch.device) -> Iterator[Tensor]:
        rows = compute_rows(weight.name, held, self.base_dtype)
        return self._merged(weight.name, rows, device) if weight.adapted else rows

    def _write_weight(
        self, weight: MergedWeight, device: torch.device, file: SafetensorsFile, pieces: Pieces
    ) -> None:
        held = self._held(weight, device, pieces)
        unchanged = weight.held == weight.written and not weight.adapted
        if isinstance(held, QuantizedTensor) and unchanged:
            return write_bnb(file, weight.name, held)
        rows = self._rows(weight, held, device)
        if weight.written is None:
            dtype = dtype_of(weight.name, self.dtype)
            return weight.stored.write(file, _rounded(weight.name, rows, dtype))
        height, width = weight.shape
        quantized = FORMATS[weight.written].empty(height, width, self.dtype, device)
        quantized.quantize_(rows, weight.name)
        write_bnb(file, weight.name, quantized)

    def _merged(self, name: str, rows: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
        """All rows of a weight, merged with its adapter."""
        assert self.adapter is not None
        stem, found = f"{KEY}{name.rpartition('.')[0]}", self._adapter_tensors
        keys = {field: f"{stem}.{peft_field}" for field, peft_field in PEFT_FIELDS.items()}
        keys |= {"whole": f"{KEY}{name}", "rows": f"{stem}.{DELTA}"}
        with safe_open(self.adapter / WEIGHTS_FILE, framework="pt") as file:
            tensors = {
                field: found[key].rows(file).to(device, torch.float32)
                for field, key in keys.items()
                if key in found
            }
        at = 0
        for chunk in rows:
            if "whole" in tensors:
                merged = tensors["whole"][at : at + len(chunk)]
            elif "rows" in tensors:
                ids = self._config.rows_of(name.split(".")[-2])
                merged = with_trained(chunk, at, ids, tensors["rows"])
            elif "ia3_l" in tensors:
                factors = tensors["ia3_l"]
                if len(factors) > 1:  # of outputs; those of inputs are for every row
                    factors = factors[at : at + len(chunk)]
                merged = chunk.float() * (factors if chunk.dim() == 2 else factors.squeeze(1))
            elif "miss_block" in tensors:
                merged = merged_blocks(chunk, tensors["miss_block"][:, at : at + len(chunk)])
            elif "oft_R" in tensors:
                merged = merged_rotations(chunk, tensors["oft_R"], self._config.block_size)
            else:
                merged = self._low_rank(name, chunk, at, tensors)
            check_finite(f"{name} with its adapter", merged)
            yield merged
            at += len(chunk)

    def _low_rank(self, name: str, chunk: Tensor, at: int, tensors: dict[str, Tensor]) -> Tensor:
        """The rows from `at` on, merged with LoRA or DoRA; those of an expert with its own A."""
        a, b, magnitude = tensors["lora_A"], tensors["lora_B"], tensors.get("magnitude")
        rank = b.size(1)
        scaling = self._config.of(name.rpartition(".")[0]).scaling
        per_expert = len(b) * rank // len(a)  # rows; of a linear all
        merged, end = [], at + len(chunk)
        while at < end:
            expert = at // per_expert
            some = slice(at, min(end, (expert + 1) * per_expert))
            rows = chunk[some.start - end : some.stop - end or None]
            own_a = a[expert * rank : (expert + 1) * rank]
            lengths = None if magnitude is None else magnitude[some]
            merged.append(merged_rows(rows, own_a, b[some], scaling, lengths))
            at = some.stop
        return torch.cat(merged) if len(merged) > 1 else merged[0]

    @cached_property
    def _adapter_tensors(self) -> dict[str, StoredTensor]:
        assert self.adapter is not None
        return read_adapter_header(self.adapter)

    @cached_property
    def _config(self) -> AdapterConfig:
        assert self.adapter is not None
        return read_adapter_config(self.adapter)

    def model_config(self, plan: list[MergedWeight]) -> dict[str, Any]:
        config = plain_config(self.weights.folder, self.dtype)
        config |= {"vocab_size": self.weights.mean_rows[1]} if self.weights.mean_rows else {}
        if any(weight.name != weight.source for weight in plan):
            config["tie_word_embeddings"] = False
        formats = {weight.name: weight.written for weight in plan if weight.written is not None}
        if formats:
            linears = {w.name for w in plan if len(w.shape) == 2 and w.name != EMBEDDINGS} | {HEAD}
            skipped = sorted(name.removesuffix(".weight") for name in linears - formats.keys())
            written = next(iter(formats.values()))
            config["quantization_config"] = bnb_config(written, self.dtype, skipped)
        return config


def _rounded(name: str, rows: Iterator[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Raises ValueError: fp16 has no such number."""
    for chunk in rows:
        rounded = chunk.to(dtype)
        check_finite(name, rounded)
        yield rounded


def _adapted(model: AnyDecoder) -> set[str]:
    """Names of the weights and biases that an adapter changes."""
    adapted = set()
    for name, module in adapted_linears(model):
        adapted.add(f"{name}.weight")
        scales_output = isinstance(module, ScaledLinear) and not module.scales_input
        if scales_output and module.bias is not None:
            adapted.add(f"{name}.bias")
    return adapted


def _formats(model: AnyDecoder) -> dict[str, str]:
    """Weight name -> format, of the quantized weights of a model."""
    return {name: data.format for name, data in quantized_weights(model).items()}
