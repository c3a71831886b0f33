"""Experts in files: what holds the rows of a stacked weight, and how they are written.

A layer's experts are one parameter `[experts * out, in]` (`modules.experts.stacked`). Files have

    experts.N.{gate,up,down}_proj.weight     a tensor for every expert and projection (Mixtral: w1,
                                             w3, w2), `[out, in]`, as published
    experts.{gate_up,down}_proj              one tensor for all, `[experts, out, in]`, as
                                             transformers 5 holds them
    experts.{gate_up,down}_proj[_bias]       gpt-oss in bf16: `[experts, in, out]` and
                                             `[experts, out]`
    experts.{gate_up,down}_proj_blocks,      gpt-oss as published: U8 `[experts, out, in/32, 16]`
        _scales                              and `[experts, out, in/32]`, see `mxfp4.py`

Any of them is read by rows, those of one expert after those of another. Plain experts are written
in the first form, gpt-oss' in the third; quantized ones by rows (`qfsdp_layout.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.qfsdp_layout import StoredQuantizedWeight
from qfsdp.checkpoint.weights.read import StackedTensor, StoredTensor
from qfsdp.checkpoint.weights.safetensors_folder import SafetensorsFolder
from qfsdp.checkpoint.weights.write import Entry, Group, SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import DecoderParts, ExpertsConfig
from qfsdp.tensor_subclasses.mxfp4 import MX_BLOCK

OF_ALL = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")
OF_SINGLE = re.compile(r"\.experts\.(\w+\.)?\d+\.")  # Unsloth: `experts.gate_up_projs.3.weight`
BLOCKS = "_blocks"
SCALES = "_scales"
PARAMETER = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)\.(weight|bias)")


# ---- reading -------------------------------------------------------------------------------------


def stacked_experts(
    plain: dict[str, StoredTensor], parts: DecoderParts, where: object
) -> dict[str, StoredTensor]:
    """The same tensors, where those of experts are replaced by stacked ones.

    Args:
        plain: name -> tensor of a folder.
        where: the folder, for errors.

    Raises:
        UserError: an expert is missing or one too many, or a tensor has another shape or dtype than
            config.json and the other experts say.
    """
    config = parts.experts
    if config is None:
        return plain
    of_one = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(config.stored)})\.weight")
    found, modules = dict[str, StoredTensor](), dict[str, set[int]]()
    for name, tensor in plain.items():
        if match := of_one.fullmatch(name):
            modules.setdefault(match[1], set()).add(int(match[2]))
        elif match := OF_ALL.fullmatch(name):
            field = "bias" if match[3] else "weight"
            stacked = _of_all(tensor, match[2], config, field == "bias")
            found[f"{match[1]}.{match[2]}.{field}"] = stacked
        else:
            found[name] = tensor
    for module, numbers in modules.items():
        if excess := numbers - set(range(config.count)):
            name = f"{module}.{min(excess)}"
            raise UserError(f"{where}: {name!r} is one too many; config.json says {config.count}")
        if missing := set(range(config.count)) - numbers:
            raise UserError(
                f"{where}: expert {module}.{min(missing)} is missing; config.json says that there "
                f"are {config.count}"
            )
        for linear in ("gate_up_proj", "down_proj"):
            shapes = _shapes_of_one(module, linear, parts)
            held = [_checked(plain, name, shape, where) for name, shape in shapes.items()]
            found[f"{module}.{linear}.weight"] = _stack(f"{module}.{linear}.weight", held, where)
    return found


def _of_all(
    tensor: StoredTensor, linear: str, config: ExpertsConfig, is_bias: bool
) -> StoredTensor:
    """A tensor of all experts as rows. `ModelWeights.check` compares the number of rows."""
    if len(tensor.shape) != (2 if is_bias else 3) or tensor.shape[0] != config.count:
        expected = f"{config.count}, {'out' if is_bias else 'out, in'}"
        raise tensor.wrong(
            f"has shape {list(tensor.shape)}; expected [{expected}], as config.json says"
        )
    experts, height = tensor.shape[:2]
    if is_bias:
        return replace(tensor, shape=(experts * height,))
    if not config.transposed:
        return replace(tensor, shape=(experts * height, tensor.shape[2]))
    return StackedTensor.of_transposed(tensor.name, tensor)


def _shapes_of_one(module: str, linear: str, parts: DecoderParts) -> dict[str, tuple[int, int]]:
    """Tensor name -> shape, in the order of the rows of a stacked linear."""
    config = parts.experts
    assert config is not None
    gate, up, down = config.stored
    inner, hidden = config.intermediate_size, parts.hidden_size
    wide = linear == "gate_up_proj"
    shape = (inner, hidden) if wide else (hidden, inner)
    names = (gate, up) if wide else (down,)
    return {f"{module}.{n}.{name}.weight": shape for n in range(config.count) for name in names}


def _checked(
    plain: dict[str, StoredTensor], name: str, shape: tuple[int, int], where: object
) -> StoredTensor:
    if name not in plain:
        raise UserError(f"{where}: tensor {name!r} is missing")
    stored = plain[name]
    if stored.shape != shape:
        raise stored.wrong(
            f"has shape {list(stored.shape)}; expected {list(shape)}, as config.json says"
        )
    return stored


def _stack(name: str, parts: list[StoredTensor], where: object) -> StoredTensor:
    for part in parts:
        if part.dtype != parts[0].dtype:
            expected = f"expected {parts[0].dtype}, as {parts[0].name!r} is"
            raise part.wrong(f"is {part.dtype}; {expected}")
    return StackedTensor.of(name, parts)


def read_mxfp4(
    files: SafetensorsFolder, config: dict[str, Any]
) -> dict[str, StoredQuantizedWeight]:
    """The experts of gpt-oss as published. Raises UserError: blocks without scales or the reverse,
    or one of another dtype or shape."""
    found, tensors = {}, files.tensors
    for name in sorted(tensors):
        if not name.endswith((BLOCKS, SCALES)):
            continue
        stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
        for needed in (stem + BLOCKS, stem + SCALES):
            if needed not in tensors:
                raise UserError(f"{files.folder}: tensor {needed!r} is missing; {name!r} is there")
        blocks, scales = tensors[stem + BLOCKS], tensors[stem + SCALES]
        expected = (*blocks.shape[:-1], MX_BLOCK // 2)
        _check_bytes(
            blocks, expected if len(blocks.shape) == 4 else ("experts", "out", "in/32", 16)
        )
        _check_bytes(scales, blocks.shape[:-1])
        experts, out, groups = scales.shape
        found[f"{stem}.weight"] = StoredQuantizedWeight(
            f"{stem}.weight",
            "mxfp4",
            (experts * out, groups * MX_BLOCK),
            [blocks.as_bytes(experts * out), scales.as_bytes(experts * out)],
            [],
            [blocks.name, scales.name],
        )
    return found


def _check_bytes(stored: StoredTensor, shape: tuple[int | str, ...]) -> None:
    if stored.dtype != "U8" or stored.shape != shape:
        expected = f"expected U8 {list(shape)}, MXFP4's blocks of {MX_BLOCK} weights"
        raise stored.wrong(f"is {stored.dtype} {list(stored.shape)}; {expected}")


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredAs:
    """The tensors of files that hold the rows of a plain parameter.

    Fields:
        shapes: name -> shape, in the order of the rows.
        transposed: the one tensor is `[experts, in, out]`, or `[in, out]`.
    """

    shapes: dict[str, tuple[int, ...]]
    transposed: bool = False

    def group(self, dtype: str) -> Group:
        """The tensors, of safetensors' `dtype`."""
        return {name: Entry(dtype, shape) for name, shape in self.shapes.items()}

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of a row of the parameter, as `write` takes it."""
        shape = next(iter(self.shapes.values()))
        return (shape[-2],) if self.transposed else shape[1:]

    def write(self, file: SafetensorsFile, pieces: Iterable[Tensor]) -> None:
        """Writes consecutive pieces of the parameter's rows."""
        (name, shape), *others = self.shapes.items()
        if self.transposed:
            for expert, rows in enumerate(of_length(pieces, shape[-1])):
                file.write(name, rows.t().reshape(-1, *shape[1:]), expert)
        elif name.endswith("_bias"):
            # A copy of each, as the next piece may overwrite it.
            file.write(name, torch.cat([piece.clone() for piece in pieces]).view(shape))
        elif not others:
            file.write_pieces(name, pieces)
        else:
            row = 0
            heights = [(name, shape[0]) for name, shape in self.shapes.items()]
            for piece in pieces:
                while len(piece):
                    name, height = heights[0]
                    part, piece = piece[: height - row], piece[height - row :]
                    file.write(name, part, row)
                    row += len(part)
                    if row == height:
                        row, heights = 0, heights[1:]


def of_length(pieces: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """The same rows in pieces of `length`."""
    row = 0
    for piece in pieces:
        while len(piece):
            if row == 0:
                block = piece.new_empty(length, *piece.shape[1:])
            part, piece = piece[: length - row], piece[length - row :]
            block[row : row + len(part)] = part
            row = (row + len(part)) % length
            if row == 0:
                yield block


def stored_as(name: str, shape: tuple[int, ...], parts: DecoderParts) -> StoredAs:
    """How a plain parameter is stored in a folder of its family."""
    match, config = PARAMETER.fullmatch(name), parts.experts
    if match is None or config is None:
        return StoredAs({name: shape})
    module, linear, field = match.groups()
    out = shape[0] // config.count
    if field == "bias":
        return StoredAs({f"{module}.{linear}_bias": (config.count, out)})
    if config.transposed:
        return StoredAs({f"{module}.{linear}": (config.count, shape[1], out)}, transposed=True)
    return StoredAs(dict(_shapes_of_one(module, linear, parts)))
