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

import functools
import itertools
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import (
    BLOCK,
    CHUNK_WEIGHTS,
    WIDE,
    dequantize_pairs,
    pack_pairs,
    write_pairs,
)
from qfsdp.tensor_subclasses.kernels.compiled import FLAT_ON_GPUS, compiled
from qfsdp.tensor_subclasses.quantized_tensor import GatherRows, QuantizedTensor

SCALE_BLOCK = 256  # absmax values per second-level scale
CHUNK_ABSMAX = 1 << 20  # absmax values at a time, a multiple of SCALE_BLOCK

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
# The two levels of each byte, one after the other.
NF4_PAIRS = tuple(itertools.chain(*itertools.product(NF4_LEVELS, repeat=2)))


def _dynamic_levels() -> list[float]:
    """The 256 levels of the signed dynamic 8-bit type (https://arxiv.org/abs/1511.04561):
    2**e fractions per decade 10**(e - 6) for e = 0..6, both signs, and 0 and 1."""
    levels = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1.0, 2**e + 1, dtype=torch.float32)
        centres = (10.0 ** (e - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        levels += centres.tolist() + (-centres).tolist()
    return sorted(levels)


# Between neighbouring levels, in fp32. Four lie right between two numbers of fp32; bitsandbytes'
# code for GPUs has the other of the two, which one fp32 weight in some ten million can tell.
_MIDPOINTS = tuple((torch.tensor(NF4_LEVELS)[1:] + torch.tensor(NF4_LEVELS)[:-1]).div(2).tolist())
_OTHERS = {0: -0.848096430, 8: 0.120255254, 12: 0.501663387, 14: 0.861478388}  # by index
_MIDPOINTS_ON_GPUS = tuple(_OTHERS.get(index, point) for index, point in enumerate(_MIDPOINTS))
DYNAMIC_LEVELS = tuple(_dynamic_levels())


class NF4Tensor(QuantizedTensor):
    """A weight in NF4; see the module's docstring for the bytes of a row and the extras."""

    format = "nf4"
    metadata_names = ("scales", "offset")
    scales: Tensor
    offset: Tensor

    @staticmethod
    def row_bytes(cols: int) -> int:
        return -(-cols // 2) + -(-cols // BLOCK)

    @staticmethod
    def metadata_shapes(rows: int, cols: int) -> list[tuple[int, ...]]:
        blocks = rows * -(-cols // BLOCK)
        return [(-(-blocks // SCALE_BLOCK),), ()]

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        scales, offset = metadata
        codes, absmax_codes = qdata.split([-(-cols // 2), -(-cols // BLOCK)], dim=1)
        dynamic = _table(DYNAMIC_LEVELS, qdata)
        products = _absmax_products(absmax_codes, scales, dynamic, row_offset)
        return dequantize_nf4(codes, products, offset, cols, dtype, row_scale, out)

    def quantize_(
        self,
        weight: Tensor | Iterable[Tensor],
        name: str = "weight",
        gather_rows: GatherRows | None = None,
    ) -> None:
        # The second level needs the absmax of every block of the whole weight, 1/64 of its
        # numbers; each rank computes all of it and keeps the codes of its own rows.
        absmax = _quantize_pieces(weight, self.qdata)
        whole = absmax if gather_rows is None else gather_rows(absmax)
        _check_finite(whole, name)
        absmax_codes, scales, offset = quantize_absmax(whole)
        if not torch.isfinite(offset):
            raise ValueError(f"{name}: its numbers are so large that their mean overflows fp32")
        mine = slice(self.row_offset, self.row_offset + absmax.size(0))
        self.qdata[:, -absmax.size(1) :] = absmax_codes[mine]
        self.scales.copy_(scales)
        self.offset.copy_(offset)


class NF4Fp32AbsmaxTensor(QuantizedTensor):
    """NF4 without double quantization: every block's absmax as it is, 4.5 bits a weight.

        row of bytes:  [ cols/2 bytes of codes | cols/64 absmax, fp32 in 4 bytes each ]

    What bitsandbytes writes with `bnb_4bit_use_double_quant: false`; no extras.
    """

    format = "nf4_fp32_absmax"

    @staticmethod
    def row_bytes(cols: int) -> int:
        return -(-cols // 2) + 4 * -(-cols // BLOCK)

    @staticmethod
    def metadata_shapes(rows: int, cols: int) -> list[tuple[int, ...]]:
        return []

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        codes, absmax = qdata.split([-(-cols // 2), 4 * -(-cols // BLOCK)], dim=1)
        absmax = absmax.contiguous().view(torch.float32)
        no_offset = absmax.new_zeros(())
        return dequantize_nf4(codes, absmax, no_offset, cols, dtype, row_scale, out)

    def quantize_(
        self,
        weight: Tensor | Iterable[Tensor],
        name: str = "weight",
        gather_rows: GatherRows | None = None,
    ) -> None:
        absmax = _quantize_pieces(weight, self.qdata)
        _check_finite(absmax if gather_rows is None else gather_rows(absmax), name)
        self.qdata[:, -4 * absmax.size(1) :] = absmax.view(torch.uint8)


# ---- quantizing ------------------------------------------------------------------------------


@compiled
def _quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, cols]`, cols a multiple of 64 -> codes uint8 `[rows, cols]`, absmax fp32
    `[rows, cols/64]`."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    unit = blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)
    # How many midpoints lie below: the index of the nearest level. Fifteen comparisons
    # vectorize; a binary search does not.
    code = torch.zeros_like(unit, dtype=torch.int32)
    for midpoint in _MIDPOINTS if weight.device.type == "cpu" else _MIDPOINTS_ON_GPUS:
        code = code + (unit > midpoint)
    return code.to(torch.uint8).flatten(1), absmax


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
        codes[start : start + step] = pack_pairs(part_codes)[:, : codes.size(1)]
        absmax[start : start + step] = part_absmax
    return codes, absmax


def _quantize_pieces(weight: Tensor | Iterable[Tensor], qdata: Tensor) -> Tensor:
    """Writes the codes of a weight, whole or in pieces, into the first columns of `packed`.

    Returns the absmax of all of its blocks, fp32 `[rows, blocks_per_row]`.
    """
    at, absmax = 0, []
    for piece in (weight,) if isinstance(weight, Tensor) else weight:
        codes, of_piece = quantize_rows(piece)
        qdata[at : at + codes.size(0), : codes.size(1)] = codes
        absmax.append(of_piece)
        at += codes.size(0)
    assert at == qdata.size(0), f"{at} rows for {qdata.size(0)}"
    return torch.cat(absmax)


def _check_finite(absmax: Tensor, name: str) -> None:
    """Looks at the absmax of the whole weight, so that every rank finds what is wrong with it
    and none waits for another."""
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
        # bitsandbytes looks codes up in a table of 65,536 points on CPUs, and finds the exact
        # nearest level on GPUs; about one absmax in 700 gets the neighbouring code. Here as
        # there, so that packed bytes agree on either device.
        point = ((unit + 1.0) * 0.5).double().mul(65535).add(0.5).float().int()
        point = point.clamp(0, 65535).flatten()  # NaN, which the caller refuses, is some number
        codes = _codes_of_points().index_select(0, point).view_as(unit)
    else:
        codes = _nearest_levels(unit)
    codes = codes.masked_fill((scales == 0).unsqueeze(1), 0)
    return codes.flatten()[: centred.numel()], scales


def _nearest_levels(unit: Tensor) -> Tensor:
    """Index (uint8) of the dynamic level that is nearest to each number of [-1, 1]."""
    levels = unit.new_tensor(DYNAMIC_LEVELS)
    return torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)


@functools.cache
def _codes_of_points() -> Tensor:
    """The code of each of 65,536 points from -1 to 1."""
    return _nearest_levels(-1.0 + (2.0 * torch.arange(65536).float()) / 65535)


def quantize(weight: Tensor, dtype: torch.dtype | None = None) -> QuantizedTensor:
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
# Two kernels: the absmax of every block, then the weights. In one, inductor works the absmax out
# again for every weight. The first stores a product, the second adds: a fused multiply-add, which
# GPU compilers like to make of the two, would round once and miss bitsandbytes' bits.


def dequantize_nf4(
    codes: Tensor,
    products: Tensor,
    offset: Tensor,
    cols: int,
    dtype: torch.dtype,
    row_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Weights `[rows, cols]` of `dtype`, computed in fp32 and rounded once, at the end.

    Args:
        codes: uint8 `[rows, ceil(cols/2)]`, rows may be apart from each other.
        products: fp32 `[rows, blocks_per_row]`; with `offset` (fp32 scalar) added: the absmax.
        row_scale: fp32 `[rows]`, multiplied in before rounding, or None.
        out: where to write them, contiguous `[rows, cols]` of `dtype`; None: new memory.
    """
    levels = _table(NF4_LEVELS, codes)

    def write(rows: slice, codes: Tensor, scale: Tensor | None, out: Tensor) -> None:
        _write_weights(codes, products[rows], offset, scale, levels, out)

    return dequantize_pairs(write, codes, cols, dtype, row_scale, out)


def _table(values: tuple[float, ...], like: Tensor) -> Tensor:
    """fp32 constants on the device of `like`, made once; not from within a trace."""
    if type(like) is Tensor and like.device.type != "meta":
        return _constants(values, like.device)
    return torch.tensor(values, dtype=torch.float32, device=like.device)


@functools.cache
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@partial(compiled, smallest=1 << 8)
def _absmax_products(
    absmax_codes: Tensor, scales: Tensor, dynamic: Tensor, row_offset: int
) -> Tensor:
    """Codes uint8 `[rows, blocks_per_row]` -> fp32, absmax less the offset."""
    rows, per_row = absmax_codes.shape
    block = torch.arange(rows * per_row, device=absmax_codes.device).view(rows, per_row)
    return dynamic[absmax_codes.int()] * scales[(block + row_offset * per_row) // SCALE_BLOCK]


# The tree of selections is more operations than inductor puts into one kernel by itself; split in
# several it is 10 times as slow (0.5 against 4.9 G weights/s per core).
ONE_KERNEL = FLAT_ON_GPUS | {"realize_opcount_threshold": 10_000, "realize_reads_threshold": 1000}


@partial(compiled, options=ONE_KERNEL, static_on_gpus=True)
def _write_weights(
    codes: Tensor,
    products: Tensor,
    offset: Tensor,
    row_scale: Tensor | None,
    levels: Tensor,
    out: Tensor,
) -> None:
    """As `dequantize_nf4`, into `out`: integers `[rows, cols/2]` that hold two weights each."""
    absmax = products + offset
    if row_scale is not None:
        absmax = absmax * row_scale.unsqueeze(1)
    absmax = absmax.unsqueeze(-1)
    if not torch.compiler.is_compiling():
        return _look_up_pairs(codes, absmax, out)
    code = codes.unflatten(1, (products.size(1), BLOCK // 2)).int()
    write_pairs(_level(code >> 4, levels) * absmax, _level(code & 15, levels) * absmax, out)


def _look_up_pairs(codes: Tensor, absmax: Tensor, out: Tensor) -> None:
    """The same uncompiled, where every operation is a pass over memory: both levels of a byte from
    a table of 256. 1.1 ms for 1536 x 576 weights (AVX2, one thread), where each half of a byte by
    itself, and then their bits put together, took 9 (bf16) and 24 (fp32); 0.3 for 577 x 192, not
    0.9."""
    pairs = _table(NF4_PAIRS, codes).view(torch.int64)
    found = pairs.index_select(0, codes.flatten().int()).view(torch.float32)
    weights = found.view(*absmax.shape[:2], BLOCK).mul_(absmax)
    dtype = next(dtype for dtype, wide in WIDE.items() if wide == out.dtype)
    out.view(dtype).copy_(weights.flatten(1))


def _level(code: Tensor, levels: Tensor) -> Tensor:
    """The NF4 level of each code (int32), compiled.

    On CPUs by 15 selections, which vectorize: 4.9 G weights/s per core, against 2.2 looking a
    byte up in two tables of 256 and 2.0 in the table of 16. GPUs read the table of 16, a single
    cache line, at full rate.
    """
    if code.device.type != "cpu":
        return level_from_table(code, levels)
    return level_by_selections(code, levels)


def level_from_table(code: Tensor, levels: Tensor) -> Tensor:
    return levels[code]


def level_by_selections(code: Tensor, levels: Tensor) -> Tensor:
    chosen = [torch.full((), v, dtype=torch.float32, device=code.device) for v in NF4_LEVELS]
    for bit in (1, 2, 4, 8):
        is_set = (code & bit) != 0
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        chosen = [torch.where(is_set, one, zero) for zero, one in pairs]
    return chosen[0]
