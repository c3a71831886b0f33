"""FP8 folders, read as the bf16 weights that they stand for.

A weight NAME is F8_E4M3 `[.., rows, cols]`, with factors beside it:

    NAME_scale_inv   "fp8": DeepSeek-V3, Qwen, Mistral. Blocks of `weight_block_size` of a matrix
                     `[.., ceil(rows / 128), ceil(cols / 128)]`, or one factor of the whole tensor
    NAME_scale       "compressed-tensors" (llm-compressor) and "fbgemm_fp8": a factor of each row
                     `[rows, 1]`, one, or blocks of `block_structure`

The weight is the product in fp32, rounded to bf16, as transformers dequantizes it. Factors are F32,
BF16 or powers of two (E8M0). Rows are read and multiplied some at a time; nothing else is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.read import STORED_DTYPES, ComputedTensor, OpenFiles, StoredTensor

SCALES = {"fp8": "_scale_inv", "compressed-tensors": "_scale", "fbgemm_fp8": "_scale"}
"""`quant_method` of config.json -> what follows a weight's name in that of its factors."""
ROTATED = "transform_config"  # inputs are turned while the model runs
FP8_METHODS = (  # for messages
    f"fp8, fbgemm_fp8, compressed-tensors with format float-quantized without {ROTATED}"
)
# Factors of inputs and of cached keys and values, which training does not round.
UNUSED = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale")
CHUNK = 1 << 15  # numbers that are multiplied at a time: in a cache, and by one thread


@dataclass(frozen=True)
class ScaledTensor(ComputedTensor):
    """A weight in FP8 times its factors, as rows of bf16.

    Fields:
        stored: the FP8 numbers, `[.., rows, cols]`.
        scale: the factors as a matrix, those of one of several matrices below those of another.
        block: rows and columns that share a factor.
    """

    stored: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]

    def fill(self, files: OpenFiles, row: int, into: Tensor) -> None:
        """Fills `into`, bf16, with the rows from `row` on."""
        height, cols = self.stored.shape[-2:]
        flat, wide = into.view(-1, cols), self.block[1]
        first = row * len(flat) // len(into)
        codes = torch.empty(flat.shape, dtype=torch.uint8)
        files.read_rows(self.stored.as_bytes(prod(self.stored.shape[:-1])), first, codes)
        at = torch.arange(first, first + len(flat))
        of_one = self.scale.rows // prod(self.stored.shape[:-2])  # 0: one factor of all
        at = at // height * of_one + at % height // self.block[0]
        scales = self._scales(files, int(at[0]), int(at[-1]) + 1)[at - at[0]]
        step = max(1, CHUNK // cols)
        parts = (tensor.split(step) for tensor in (flat, codes, scales))
        for some, of_some, factors in zip(*parts, strict=True):
            numbers = as_numbers(of_some, self.stored.dtype)
            if cols % wide:
                numbers *= factors.repeat_interleave(wide, dim=1)[:, :cols]
            else:
                numbers.view(len(some), -1, wide).mul_(factors.unsqueeze(2))
            some.copy_(numbers)

    def _scales(self, files: OpenFiles, start: int, stop: int) -> Tensor:
        scales = torch.empty(
            stop - start, self.scale.shape[1], dtype=STORED_DTYPES[self.scale.dtype]
        )
        files.read_rows(self.scale, start, scales)
        if self.scale.dtype == "U8":
            return (scales.float() - 127).exp2()
        return scales.float()


def as_numbers(codes: Tensor, dtype: str) -> Tensor:
    """FP8 numbers as fp32; `codes` are their bytes.

    The exponent and mantissa of E4M3, moved into those of fp16, are 1 / 256 of the number, also
    where it is subnormal. So it is converted at the rate of fp16; PyTorch's own conversion takes 30
    times longer on a CPU. NaN is the one code that differs.
    """
    if dtype != "F8_E4M3" or int(codes.bitwise_and(127).amax()) == 127:
        return codes.view(STORED_DTYPES[dtype]).float()
    bits = codes.view(torch.int8).to(torch.int16)
    bits <<= 7
    bits &= -0x4080  # without the second copy of the sign
    return bits.view(torch.float16).float().mul_(256)


def quantization_of(config: dict[str, Any]) -> Any:
    """The `quantization_config` of a `config.json`, also of the text part of a larger model."""
    text = config.get("text_config")
    of_text = text.get("quantization_config") if isinstance(text, dict) else None
    return config.get("quantization_config", of_text)


def is_fp8(quantization: Any) -> bool:
    """Whether a `quantization_config` is of FP8 weights."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    packed = method == "compressed-tensors" and (
        quantization.get("format") != "float-quantized" or bool(quantization.get(ROTATED))
    )
    return method in SCALES and not packed


def without_scales(
    tensors: Mapping[str, StoredTensor], quantization: dict[str, Any]
) -> dict[str, StoredTensor]:
    """The same tensors, where those in FP8 are read times their factors, and those are left out.
    Raises UserError: a weight in FP8 has no factors, or they do not fit it."""
    suffix = SCALES[quantization["quant_method"]]
    sizes = list(_sizes(quantization))
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNUSED)}
    for name, stored in tensors.items():
        if stored.dtype not in ("F8_E4M3", "F8_E5M2"):
            continue
        scale = found.pop(f"{name}{suffix}", None)
        if scale is None:
            missing = f"{name + suffix!r} with its factors is missing"
            raise stored.wrong(f"is {stored.dtype}, and {missing}", name)
        block = _block(stored, scale, sizes)
        if block is None or scale.dtype not in ("F32", "BF16", "F16", "U8", "F8_E8M0"):
            what = f"no factors of {name!r} {list(stored.shape)}"
            raise scale.wrong(f"is {scale.dtype} {list(scale.shape)}, which are {what}")
        height = prod(scale.shape[:-1]) if len(scale.shape) > 1 else max(1, scale.rows)
        width = scale.shape[-1] if len(scale.shape) > 1 else 1
        matrix = StoredTensor(
            scale.name, scale.file, scale.dtype, (height, width), scale.start, scale.size
        )
        size = 2 * prod(stored.shape)
        found[name] = ScaledTensor(
            stored.name, stored.file, "BF16", stored.shape, 0, size, stored, matrix, block
        )
    return found


def _sizes(value: Any) -> Iterator[tuple[int, int]]:
    """The sizes of blocks that a `quantization_config` names, also for groups of its linears."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _sizes(inner)
        pair = isinstance(inner, list | tuple) and [type(size) for size in inner] == [int, int]
        if pair and key in ("weight_block_size", "block_structure"):
            yield inner[0], inner[1]


def _block(
    stored: StoredTensor, scale: StoredTensor, sizes: list[tuple[int, int]]
) -> tuple[int, int] | None:
    """Rows and columns of a weight that share a factor; None: the shapes do not fit."""
    if len(stored.shape) < 2:
        return None
    rows, cols = stored.shape[-2:]
    if prod(scale.shape) == 1:
        return prod(stored.shape[:-1]), cols
    grid = scale.shape if len(scale.shape) > 1 else (scale.rows, 1)
    if grid[:-2] != stored.shape[:-2]:
        return None
    of_all = rows // max(1, grid[-2]), cols // max(1, grid[-1])
    for high, wide in (*sizes, of_all):
        if high > 0 < wide and (-(-rows // high), -(-cols // wide)) == tuple(grid[-2:]):
            return high, wide
    return None
