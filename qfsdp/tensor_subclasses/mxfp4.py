"""MXFP4: 4-bit floating point with one power of two per 32 weights, as gpt-oss is published.

OCP Microscaling Formats v1.0 (https://www.opencompute.org/documents/
ocp-microscaling-formats-mx-v1-0-spec-final-pdf):

    block      32 consecutive weights of a row share one scale
    scale      E8M0: the byte s stands for 2**(s - 127); 255 is NaN
    code       E2M1: sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6

    row of bytes:  [ cols/2 bytes of codes | cols/32 scales ]

That is 4.25 bits a weight, without metadata. The first weight of a byte is in its low half, as in
the tensors `_blocks` and `_scales` of gpt-oss: the bytes of such a row are those of the
checkpoint, side by side. Dequantizing is exact in fp32 and bf16. A product above the largest
number of fp32 is infinite, as in transformers' `convert_moe_packed_tensors`.

Quantizing follows section 6.3 of the specification: the scale is 2**(floor(log2(max |w|)) - 2), as
2 is the largest exponent of E2M1; w / scale is rounded to the nearest code, ties to the even one,
and what is above 6 becomes 6. Blocks of zeros have the scale byte 0. If 32 does not divide `cols`,
the last block of every row is shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import KERNEL_CHUNK, dequantize_pairs, table, write_uncompiled
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.kernels.dispatch import FLAT_ON_GPUS
from qfsdp.tensor_subclasses.kernels.pairs import write_pairs
from qfsdp.tensor_subclasses.quantized_tensor import GatherRows, QuantizedTensor

MX_BLOCK = 32

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = (*_MAGNITUDES, *(-level for level in _MAGNITUDES))
E2M1_PAIRS = tuple(level for high in E2M1_LEVELS for low in E2M1_LEVELS for level in (low, high))
"""The two levels of each byte, one after the other."""


class MXFP4Tensor(QuantizedTensor):
    """A weight in MXFP4; the module's docstring describes the bytes of a row."""

    format = "mxfp4"

    @staticmethod
    def row_bytes(cols: int) -> int:
        return -(-cols // 2) + -(-cols // MX_BLOCK)

    @staticmethod
    def has_finite_scales(qdata: Tensor, cols: int) -> bool:
        return not bool((qdata[:, -(-cols // 2) :] == 255).any())

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
    ) -> Tensor:
        codes, scales = qdata.split([-(-cols // 2), -(-cols // MX_BLOCK)], dim=1)
        levels = table(E2M1_LEVELS, codes)

        def write(rows: slice, codes: Tensor, row_scale: Tensor | None, out: Tensor) -> None:
            _write_weights(codes, scales[rows], row_scale, levels, out)

        return dequantize_pairs(write, codes, cols, dtype, row_scale, MX_BLOCK)

    def _quantize(
        self, pieces: Iterable[Tensor], name: str, gather_rows: GatherRows | None
    ) -> None:
        code_bytes, step = -(-self.cols // 2), max(1, KERNEL_CHUNK // self.cols)
        at, finite = 0, []
        for piece in pieces:
            for part in piece.split(step):
                padded = F.pad(part, (0, -self.cols % MX_BLOCK)).contiguous()
                codes, scales, finite_rows = quantize_blocks(padded)
                into = self.qdata[at : at + len(part)]
                into[:, :code_bytes] = pack(codes)[:, :code_bytes]
                into[:, code_bytes:] = scales
                finite.append(finite_rows)
                at += len(part)
        of_rows = torch.cat(finite).float().unsqueeze(1) if finite else torch.ones(0, 1)
        # Checked over all rows: every rank raises, and none waits for another.
        whole = of_rows if gather_rows is None else gather_rows(of_rows)
        if not whole.all():
            row = int((whole == 0).flatten().nonzero()[0])
            raise ValueError(f"{name}: row {row} holds NaN or infinity; it cannot be quantized")


@compiled
def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[rows, cols]`, cols a multiple of 32 -> codes uint8 `[rows, cols]`, scales uint8
    `[rows, cols/32]`, and whether a row is finite, bool `[rows]`."""
    blocks = weight.float().unflatten(1, (-1, MX_BLOCK))
    largest = blocks.abs().amax(-1)
    # The exponent of fp32 is biased by 127, as that of E8M0; 0 is that of numbers below 2**-126.
    scale = ((largest.view(torch.int32) >> 23) - 2).clamp(min=0)
    inverse = ((254 - scale) << 23).view(torch.float32)
    unit = blocks * inverse.unsqueeze(-1)
    size = unit.abs()
    code = torch.signbit(unit).to(torch.int32) * 8
    # The number of midpoints below. A tie goes to the even code: up where the lower one is odd.
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code = code + (size > midpoint)
    for midpoint in (0.75, 1.75, 3.5):
        code = code + (size >= midpoint)
    finite = torch.isfinite(largest).all(1)
    return code.to(torch.uint8).flatten(1), scale.to(torch.uint8), finite


@compiled
def pack(codes: Tensor) -> Tensor:
    """Codes uint8 `[rows, cols]` -> two codes in a byte, the first low (see `pack_pairs`)."""
    pairs = codes.view(torch.int16)
    return ((pairs & 15) | (pairs >> 4)).to(torch.uint8)


@partial(compiled, options=FLAT_ON_GPUS, static_on_gpus=True)
def _write_weights(
    codes: Tensor, scales: Tensor, row_scale: Tensor | None, levels: Tensor, out: Tensor
) -> None:
    """The kernel of `dequantize_rows`; `out` holds two weights in each integer (`write_pairs`)."""
    bits = scales.int()
    # Bits of 2**(s - 127) in fp32. With the first bit of the mantissa, s = 0 is 2**-127, for which
    # fp32 has no exponent, and s = 255 is NaN and not infinity.
    mantissa = ((bits == 0) | (bits == 255)).int()
    scale = ((bits << 23) | (mantissa << 22)).view(torch.float32)
    if row_scale is not None:
        scale = scale * row_scale.unsqueeze(1)
    scale = scale.unsqueeze(-1)
    if not torch.compiler.is_compiling():
        return write_uncompiled(E2M1_PAIRS, codes, scale, out)
    code = codes.unflatten(1, (scales.size(1), MX_BLOCK // 2)).int()
    write_pairs(levels[code & 15] * scale, levels[code >> 4] * scale, out)
