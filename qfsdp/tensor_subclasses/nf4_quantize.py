"""Weights to the bytes of NF4; `nf4` has the format, and bytes to weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK, KERNEL_CHUNK
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.nf4_levels import DYNAMIC_LEVELS, NF4_LEVELS, SCALE_BLOCK
from qfsdp.tensor_subclasses.quantized_tensor import GatherRows

CHUNK_ABSMAX = 1 << 20  # absmax values at a time, a multiple of SCALE_BLOCK

# Midpoints of neighbouring levels, in fp32. Four lie exactly between two fp32 numbers;
# bitsandbytes' code for GPUs rounds these the other way. One fp32 weight in some ten million
# shows the difference.
_MIDPOINTS = tuple((torch.tensor(NF4_LEVELS)[1:] + torch.tensor(NF4_LEVELS)[:-1]).div(2).tolist())
_OTHER_ROUNDING = {0: -0.848096430, 8: 0.120255254, 12: 0.501663387, 14: 0.861478388}  # by index
_MIDPOINTS_ON_GPUS = tuple(_OTHER_ROUNDING.get(i, mid) for i, mid in enumerate(_MIDPOINTS))


def quantize_nf4(
    weight: Any, pieces: Iterable[Tensor], name: str, gather_rows: GatherRows | None
) -> None:
    """`NF4Tensor._quantize`."""
    # The second level needs the absmax of every block of the whole weight, one per 64 weights.
    # Each rank quantizes all of them and keeps the codes of its own rows.
    absmax = write_codes(pieces, weight.qdata)
    whole = absmax if gather_rows is None else gather_rows(absmax)
    check_finite(whole, name)
    absmax_codes, scales, offset = quantize_absmax(whole)
    if not torch.isfinite(offset):
        raise ValueError(f"{name}: its mean absmax overflows fp32; it cannot be quantized")
    mine = slice(weight.row_offset, weight.row_offset + absmax.size(0))
    weight.qdata[:, -absmax.size(1) :] = absmax_codes[mine]
    weight.scales.copy_(scales)
    weight.offset.copy_(offset)


@compiled
def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, cols]`, cols a multiple of 64 -> codes uint8 `[rows, cols]`, absmax fp32
    `[rows, cols/64]`."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    unit = blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)
    # The number of midpoints below is the index of the nearest level. Fifteen comparisons
    # vectorize, a binary search does not.
    code = torch.zeros_like(unit, dtype=torch.int32)
    for midpoint in _MIDPOINTS if weight.device.type == "cpu" else _MIDPOINTS_ON_GPUS:
        code = code + (unit > midpoint)
    return code.to(torch.uint8).flatten(1), absmax


@compiled
def pack_pairs(codes: Tensor) -> Tensor:
    """Codes uint8 `[rows, cols]` -> two codes in a byte, the first high, `[rows, cols/2]`.

    A separate kernel, on pairs of bytes as 16-bit numbers: in the kernel that computes the codes,
    separating even and odd ones prevents vectorization, 138 against 780 M weights/s per core.
    """
    pairs = codes.view(torch.int16)
    return (((pairs & 15) << 4) | (pairs >> 8)).to(torch.uint8)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """First level of NF4, for any rows of a weight `[rows, cols]`, floating point.

    Returns:
        codes uint8 `[rows, ceil(cols/2)]` and absmax fp32 `[rows, ceil(cols/64)]`. A block with a
        weight that is NaN or infinite gets such an absmax, and its codes are meaningless.
    """
    rows, cols = weight.shape
    codes = weight.new_empty(rows, -(-cols // 2), dtype=torch.uint8)
    absmax = weight.new_empty(rows, -(-cols // BLOCK), dtype=torch.float32)
    step = max(1, KERNEL_CHUNK // max(1, cols))
    for start in range(0, rows, step):
        part = weight[start : start + step]
        if cols % BLOCK:
            part = F.pad(part, (0, -cols % BLOCK))
        part_codes, part_absmax = quantize_blocks(part.contiguous())
        codes[start : start + step] = pack_pairs(part_codes)[:, : codes.size(1)]
        absmax[start : start + step] = part_absmax
    return codes, absmax


def write_codes(pieces: Iterable[Tensor], qdata: Tensor) -> Tensor:
    """Writes the codes of consecutive rows into the first columns of `qdata`; returns the absmax of
    their blocks, fp32 `[rows, blocks_per_row]`."""
    at, absmax = 0, []
    for piece in pieces:
        codes, of_piece = quantize_rows(piece)
        qdata[at : at + codes.size(0), : codes.size(1)] = codes
        absmax.append(of_piece)
        at += codes.size(0)
    return torch.cat(absmax)


def check_finite(absmax: Tensor, name: str) -> None:
    """Raises for NaN or infinity in the absmax of the whole weight: every rank raises, and none
    waits for another."""
    if not (finite := torch.isfinite(absmax).all(1)).all():
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{name}: row {row} holds NaN or infinity; it cannot be quantized")


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Second level, over the absmax of a whole weight.

    Args:
        absmax: fp32 `[rows, blocks_per_row]`, all rows.

    Returns:
        codes uint8 of the same shape, scales fp32 `[ceil(blocks/256)]`, offset fp32 `[]`.
    """
    flat = absmax.flatten()
    offset = flat.mean()
    codes = torch.empty_like(flat, dtype=torch.uint8)
    scales = flat.new_empty(-(-flat.numel() // SCALE_BLOCK))
    for start in range(0, flat.numel(), CHUNK_ABSMAX):
        part = slice(start, start + CHUNK_ABSMAX)
        part_scales = slice(start // SCALE_BLOCK, (start + CHUNK_ABSMAX) // SCALE_BLOCK)
        codes[part], scales[part_scales] = _quantize_centred(flat[part] - offset)
    return codes.view_as(absmax), scales, offset


def _quantize_centred(centred: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `[n]` -> codes uint8 `[n]` and scales fp32 `[ceil(n/256)]`."""
    blocks = F.pad(centred, (0, -centred.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    scales = blocks.abs().amax(1)
    unit = (blocks * (1.0 / scales.clamp(min=1e-38)).unsqueeze(1)).clamp(-1, 1)
    if centred.device.type == "cpu":
        # On CPUs bitsandbytes looks codes up in a table of 65,536 points, on GPUs it finds the
        # exact nearest level, of two equally near ones that with the even code; about one absmax in
        # 700 gets the neighbouring code. We do the same, so that our bytes equal its bytes on both
        # devices.
        point = ((unit + 1.0) * 0.5).double().mul(65535).add(0.5).float().int()
        point = point.clamp(0, 65535).flatten()  # NaN: the caller has refused it
        codes = _codes_of_points().index_select(0, point).view_as(unit)
    else:
        codes = nearest_levels(unit, ties_to_even=True)
    codes = codes.masked_fill((scales == 0).unsqueeze(1), 0)
    return codes.flatten()[: centred.numel()], scales


def nearest_levels(unit: Tensor, ties_to_even: bool = False) -> Tensor:
    """Index (uint8) of the dynamic level that is nearest to each number of [-1, 1]. A number in the
    middle of two levels has the lower index, or the even one."""
    levels = unit.new_tensor(DYNAMIC_LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    if ties_to_even:  # from odd to even: the middle itself belongs to the upper level
        middles[1::2] = torch.nextafter(middles[1::2], middles.new_tensor(-2.0))
    return torch.bucketize(unit, middles, out_int32=True).to(torch.uint8)


@functools.cache
def _codes_of_points() -> Tensor:
    """The code of each of 65,536 points from -1 to 1."""
    return nearest_levels(-1.0 + (2.0 * torch.arange(65536).float()) / 65535)
