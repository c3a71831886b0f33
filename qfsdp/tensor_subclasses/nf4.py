"""NF4: 4-bit NormalFloat with double quantization, bit for bit as bitsandbytes has it.

Format of QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314):

    block      64 consecutive weights of a row share one scale, absmax = max |w|
    code       4 bits, the nearest of 16 levels to w / absmax; two codes a byte, first in
               the high nibble
    absmax     itself quantized to 8 bits: code of the nearest of 256 "dynamic" levels to
               (absmax - offset) / scale, with one offset for the weight (the mean absmax)
               and one fp32 scale per 256 blocks, counted over the whole weight row by row

    row of bytes:  [ cols/2 bytes of codes | cols/64 bytes of absmax codes ]
    extras:        scales  fp32 [ceil(blocks / 256)],  offset  fp32 []

That is 4.127 bits a weight. bitsandbytes keeps the same codes in flat arrays of their own;
taking the row apart (or together) converts one into the other without any rounding. A
`cols` that 64 does not divide gets a shorter last block of its own in every row; there
bitsandbytes lets blocks run on into the next row, so such weights are not exchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.compiled import compiled
from qfsdp.tensor_subclasses.packed import GatherRows, PackedTensor

BLOCK = 64
SCALE_BLOCK = 256  # absmax values per second-level scale
CHUNK_WEIGHTS = 1 << 22  # weights quantized at a time: bounds temporaries to some 50 MB

# The 16 levels, published by the authors of QLoRA (appendix E); exact in fp32.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def _dynamic_levels() -> list[float]:
    """The 256 levels of the signed dynamic 8-bit type (https://arxiv.org/abs/1511.04561):
    2**e fractions per decade 10**(e - 6) for e = 0..6, both signs, and 0 and 1."""
    levels = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1.0, 2**e + 1, dtype=torch.float32)
        centres = (10.0 ** (e - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        levels += centres.tolist() + (-centres).tolist()
    return sorted(levels)


_MIDPOINTS = tuple((torch.tensor(NF4_LEVELS)[1:] + torch.tensor(NF4_LEVELS)[:-1]).div(2).tolist())
_DYNAMIC_LEVELS = tuple(_dynamic_levels())


class NF4Tensor(PackedTensor):
    """A weight in NF4; see the module's docstring for the bytes of a row and the extras."""

    format = "nf4"
    extra_names = ("scales", "offset")
    scales: Tensor
    offset: Tensor

    @staticmethod
    def row_bytes(cols: int) -> int:
        return -(-cols // 2) + -(-cols // BLOCK)

    @staticmethod
    def extra_shapes(rows: int, cols: int) -> list[tuple[int, ...]]:
        blocks = rows * -(-cols // BLOCK)
        return [(-(-blocks // SCALE_BLOCK),), ()]

    @staticmethod
    def dequantize_rows(
        packed: Tensor, extras: Sequence[Tensor], cols: int, row_offset: int, dtype: torch.dtype
    ) -> Tensor:
        scales, offset = extras
        return _dequantize(packed, scales, offset, cols, row_offset, dtype)

    def quantize_(
        self, weight: Tensor, name: str = "weight", gather_rows: GatherRows | None = None
    ) -> None:
        # The second level needs the absmax of every block of the whole weight, 1/64 of its
        # numbers; each rank computes all of it and keeps the codes of its own rows.
        codes, absmax = quantize_rows(weight)
        whole = absmax if gather_rows is None else gather_rows(absmax)
        # Looked at whole, so that every rank finds what is wrong and none waits for another.
        if not (finite := torch.isfinite(whole).all(1)).all():
            row = int((~finite).nonzero()[0])
            raise ValueError(f"{name}: row {row} holds NaN or infinity; it cannot be quantized")
        absmax_codes, scales, offset = quantize_absmax(whole)
        if not torch.isfinite(offset):
            raise ValueError(f"{name}: its numbers are so large that their mean overflows fp32")
        self.packed[:, : codes.size(1)] = codes
        mine = slice(self.row_offset, self.row_offset + codes.size(0))
        self.packed[:, codes.size(1) :] = absmax_codes[mine]
        self.scales.copy_(scales)
        self.offset.copy_(offset)


# ---- quantizing ------------------------------------------------------------------------------


@compiled
def _quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, cols]`, cols a multiple of 64 -> codes uint8 `[rows, cols/2]`, absmax fp32
    `[rows, cols/64]`."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    unit = blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)
    # How many midpoints lie below: the index of the nearest level. Fifteen comparisons
    # vectorize; a binary search does not.
    code = torch.zeros_like(unit, dtype=torch.int32)
    for midpoint in _MIDPOINTS:
        code = code + (unit > midpoint)
    high, low = code.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return (high * 16 + low).to(torch.uint8), absmax


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """First level of NF4, for any rows of a weight.

    Args:
        weight: `[rows, cols]`, floating point, any device.

    Returns:
        codes uint8 `[rows, ceil(cols/2)]` and absmax fp32 `[rows, ceil(cols/64)]`. Where a
        weight is NaN or infinite, so is its absmax, and the codes mean nothing.
    """
    rows, cols = weight.shape
    codes = weight.new_empty(rows, -(-cols // 2), dtype=torch.uint8)
    absmax = weight.new_empty(rows, -(-cols // BLOCK), dtype=torch.float32)
    step = max(1, CHUNK_WEIGHTS // max(1, cols))
    for start in range(0, rows, step):
        part = weight[start : start + step]
        if cols % BLOCK:
            part = F.pad(part, (0, -cols % BLOCK))
        part_codes, part_absmax = _quantize_blocks(part.contiguous())
        codes[start : start + step] = part_codes[:, : codes.size(1)]
        absmax[start : start + step] = part_absmax
    return codes, absmax


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Second level, over the absmax of a whole weight.

    Args:
        absmax: fp32 `[rows, blocks_per_row]`, all rows.

    Returns:
        codes uint8 of the same shape, scales fp32 `[ceil(blocks/256)]`, offset fp32 `[]`.
    """
    flat = absmax.flatten()
    offset = flat.mean()
    centred = F.pad(flat - offset, (0, -flat.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    scales = centred.abs().amax(1)
    unit = (centred * (1.0 / scales.clamp(min=1e-38)).unsqueeze(1)).clamp(-1, 1)
    if absmax.device.type == "cpu":
        # bitsandbytes looks codes up in a table of 65,536 points on CPUs, and finds the exact
        # nearest level on GPUs; about one absmax in 700 gets the neighbouring code. Here as
        # there, so that packed bytes agree on either device.
        point = ((unit + 1.0) * 0.5).double().mul(65535).add(0.5).float().floor()
        unit = -1.0 + (2.0 * point) / 65535
    levels = absmax.new_tensor(_DYNAMIC_LEVELS)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    codes = codes.masked_fill((scales == 0).unsqueeze(1), 0)
    codes = codes.to(torch.uint8).flatten()[: flat.numel()]
    return codes.view_as(absmax), scales, offset


def quantize(weight: Tensor, dtype: torch.dtype | None = None) -> PackedTensor:
    """A whole plain weight `[rows, cols]` as NF4 on the same device.

    Args:
        weight: floating point.
        dtype: what the result stands for; default: the dtype of `weight`.
    """
    rows, cols = weight.shape
    target = NF4Tensor.empty(rows, cols, dtype or weight.dtype, weight.device)
    target.quantize_(weight)
    return target


# ---- dequantizing ----------------------------------------------------------------------------


@compiled
def _dequantize(
    packed: Tensor, scales: Tensor, offset: Tensor, cols: int, row_offset: int, dtype: torch.dtype
) -> Tensor:
    """Bytes -> `[rows, cols]` of `dtype`, computed in fp32 and rounded once, at the end."""
    rows = packed.size(0)
    per_row = (cols + BLOCK - 1) // BLOCK
    code_bytes = (cols + 1) // 2
    # Tables are made in here: module-level tensor constants break dynamo under FSDP.
    dynamic = torch.tensor(_DYNAMIC_LEVELS, dtype=torch.float32, device=packed.device)
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=packed.device)
    block = torch.arange(rows * per_row, device=packed.device).view(rows, per_row)
    scale = scales[(block + row_offset * per_row) // SCALE_BLOCK]
    # Product in fp64, rounded to fp32, then the sum: a fused multiply-add, which GPU
    # compilers like to make of it, would round once and miss bitsandbytes' bits.
    absmax_codes = packed[:, code_bytes:].int()
    absmax = (dynamic[absmax_codes].double() * scale.double()).float() + offset

    codes = packed[:, :code_bytes]
    if cols % BLOCK:
        codes = F.pad(codes, (0, per_row * BLOCK // 2 - code_bytes))
    codes = codes.int().unflatten(1, (per_row, BLOCK // 2))
    absmax = absmax.unsqueeze(-1)
    # Both nibbles are looked up, scaled and rounded apart and interleaved last: 2.1 to 2.9 times
    # as fast on AVX-512 as looking up interleaved codes (1.6 G weights/s on two cores).
    high = (levels[codes >> 4] * absmax).to(dtype)
    low = (levels[codes & 15] * absmax).to(dtype)
    return torch.stack((high, low), dim=-1).flatten(1)[:, :cols].contiguous()
