"""The tensors of a GGUF file: names, types, and the order of rows and columns.

llama.cpp's `llama` and some others rotate neighbouring numbers of a head, Hugging Face's the
numbers i and i + half: rows of queries and keys are reordered for them.

With K query heads, value head j of Gated DeltaNet has the queries of head j // (V / K) in Hugging
Face's models, and of head j % K in llama.cpp's Qwen 3.5: value heads are reordered wherever they
stand. Its Qwen3-Next keeps the order, but wants the gates apart. Norms hold their whole weight in
the file, decays -exp(A_log). Gate and up of experts are two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from qfsdp.checkpoint.export.gguf_metadata import NEIGHBOURS, GgufModel
from qfsdp.checkpoint.weights.experts import PARAMETER, of_length
from qfsdp.checkpoint.weights.merge import MergedWeight
from qfsdp.checkpoint.weights.other_names import EMBEDDINGS, HEAD
from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import RecurrentConfig

if TYPE_CHECKING:
    import gguf

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
# Linears that stay in fp32. Rounding a router sends tokens to other experts, and rounding a decay
# changes all later states. llama.cpp computes the convolution of recurrent layers in fp32 only.
FP32 = ("gate", "shared_expert_gate", "conv1d", "in_proj_a", "in_proj_b", "in_proj_ba")
REORDERED = 512  # rows that are reordered at once


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file, and the weight that it is made from.

    Fields:
        name, shape: in the file.
        weight: of the merged model; two tensors may be parts of one.
        type: of the numbers in the file.
        rows: which rows of every `length` rows the file has, in its order; None: all, as they are.
        columns: the same of all columns.
        change: what the file has in place of a number.
    """

    name: str
    shape: tuple[int, ...]
    weight: MergedWeight
    type: gguf.GGMLQuantizationType
    rows: Tensor | None = None
    length: int = 0
    columns: Tensor | None = None
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block * size

    def arrays(self, rows: Iterator[Tensor]) -> Iterator[Any]:
        """The weight's rows as the file has them. Raises ValueError: f16 has no such number;
        quantized types have it for the scales of their blocks.

        Rows are reordered after they are quantized: where a tensor is reordered as a whole, its
        bytes in the file are held once (`in_proj_qkv` of Qwen3.5-9B in f32: 134 MB), not its
        numbers.
        """
        made = self._quantized(rows)
        if self.rows is None:
            yield from made
        else:
            for block in of_length(map(torch.from_numpy, made), self.length):
                for some in self.rows.split(REORDERED):
                    yield block[some].numpy()

    def _quantized(self, rows: Iterator[Tensor]) -> Iterator[Any]:
        from gguf.quants import quantize

        for chunk in rows:
            numbers = chunk.float().cpu()
            if numbers.dim() > 1:
                numbers = numbers.flatten(1)
            if self.columns is not None:
                numbers = numbers[:, self.columns]
            if self.change is not None:
                numbers = self.change(numbers)
            in_f16 = self.type.name not in ("F32", "BF16")  # the numbers, or scales of blocks
            if in_f16 and numbers.numel() and numbers.abs().amax() >= 65_520:
                raise ValueError(f"{self.weight.name} has numbers too large for f16")
            yield quantize(numbers.numpy(), self.type)


class Layout:
    """How llama.cpp lays out the weights of a model."""

    def __init__(self, model: GgufModel, type: GgufType) -> None:
        import gguf

        self.model, self.type = model, type
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        if model.architecture not in kinds:
            raise UserError(
                f"format: gguf needs {model.architecture!r}, which the installed package gguf does "
                "not have; expected `pip install -U gguf`"
            )
        layers = model.parts.num_hidden_layers
        self._names = gguf.get_tensor_name_map(kinds[model.architecture], layers)

    def tensors(self, weight: MergedWeight) -> list[GgufTensor]:
        """The tensors that a weight becomes. Raises UserError: llama.cpp has none for it."""
        parts = self.model.parts
        name = weight.name.replace(f"{parts.body}.", "model.", 1)
        name = name.replace(f".{parts.mlp.module}.", ".mlp.")
        *_, stem, field = ("", *name.split("."))
        if match := PARAMETER.fullmatch(name):
            return self._experts(weight, *match.groups())
        if stem == "in_proj_qkvz":
            return self._queries_and_gates(weight, name)
        if field == "dt_bias":
            name = name.replace("dt_bias", "dt_proj.bias")
        shape = weight.shape
        if stem in ("conv1d", "shared_expert_gate"):
            shape = tuple(size for size in shape if size != 1)
        made = self._tensor(weight, name, shape)
        if self.model.architecture in NEIGHBOURS and stem in ("q_proj", "k_proj"):
            size = parts.head_dim
            made = replace(made, rows=torch.arange(size).view(2, -1).t().flatten(), length=size)
        if stem.endswith("norm") and ".linear_attn." not in name and parts.norm.offset:
            made = replace(made, change=lambda numbers: numbers + parts.norm.offset)
        if ".linear_attn." in name and parts.recurrent is not None and not parts.recurrent.fused:
            made = _reordered(made, stem if field == "weight" else field, parts.recurrent)
        if field == "A_log":
            made = replace(made, change=lambda numbers: -numbers.exp())
        return [made]

    def _tensor(self, weight: MergedWeight, name: str, shape: tuple[int, ...]) -> GgufTensor:
        there = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if there is None:
            kind = self.model.architecture
            raise UserError(f"model.path: llama.cpp's {kind} has no {weight.name!r}")
        return GgufTensor(there, shape, weight, self._type(name, shape))

    def _experts(
        self, weight: MergedWeight, module: str, linear: str, field: str
    ) -> list[GgufTensor]:
        experts = self.model.parts.experts
        assert experts is not None
        of_one = weight.shape[0] // experts.count
        if linear == "down_proj":
            shape = (experts.count, of_one, *weight.shape[1:])
            return [self._tensor(weight, f"{module}.{linear}.{field}", shape)]
        half = of_one // 2
        found = []
        for at, one in enumerate(("gate_proj", "up_proj")):
            shape = (experts.count, half, *weight.shape[1:])
            made = self._tensor(weight, f"{module}.{one}.{field}", shape)
            rows = torch.arange(at * half, (at + 1) * half)
            found.append(replace(made, rows=rows, length=of_one))
        return found

    def _queries_and_gates(self, weight: MergedWeight, name: str) -> list[GgufTensor]:
        """Qwen3-Next: rows are `key_heads` times queries, keys, values and gates of a head."""
        part = self.model.parts.recurrent
        assert part is not None
        height, width = weight.shape
        values = part.widths[2] // part.key_heads
        of_heads = torch.arange(height).view(part.key_heads, -1)
        sizes = [part.key_dim, part.key_dim, values, values]
        *mixed, gates = (one.flatten() for one in of_heads.split(sizes, 1))
        found = []
        for one, rows in (("qkv", torch.cat(mixed)), ("z", gates)):
            made = self._tensor(weight, name.replace("qkvz", one), (len(rows), width))
            found.append(replace(made, rows=rows, length=height))
        return found

    def _type(self, name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        """fp32 for vectors and `FP32`; at least 8 bits for embeddings and the output layer, as
        llama.cpp's own quantizer does; 16 bits where the columns are no whole blocks."""
        import gguf

        types = gguf.GGMLQuantizationType
        if len(shape) == 1 or name.split(".")[-2] in FP32:
            return types.F32
        wanted = types[self.type.upper()]
        if name in (EMBEDDINGS, HEAD) and self.type[0] == "q":
            wanted = types.Q8_0
        return types.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def _reordered(made: GgufTensor, kind: str, part: RecurrentConfig) -> GgufTensor:
    """A tensor of a recurrent layer of Qwen 3.5 with the value heads of one query head apart."""
    heads = torch.arange(part.value_heads).view(part.key_heads, -1).t().flatten()
    values = (heads.unsqueeze(1) * part.value_dim + torch.arange(part.value_dim)).flatten()
    if kind == "out_proj":
        return replace(made, columns=values)
    before = sum(part.widths[:2])
    rows = {
        "in_proj_z": values,
        **dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), heads),
        **dict.fromkeys(
            ("in_proj_qkv", "conv1d"), torch.cat((torch.arange(before), before + values))
        ),
    }.get(kind)
    return made if rows is None else replace(made, rows=rows, length=len(rows))
