"""NF4's bytes to weights; `nf4` describes the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK, dequantize_pairs, table, write_uncompiled
from qfsdp.tensor_subclasses.kernels.compiled import SMALLEST_COMPILED, compiled, on_cpu
from qfsdp.tensor_subclasses.kernels.dispatch import FLAT_ON_GPUS, ROUNDED_AS_ON_CPUS
from qfsdp.tensor_subclasses.nf4_levels import (
    DYNAMIC_LEVELS,
    NF4_LEVELS,
    NF4_PAIRS,
    SCALE_BLOCK,
    write_compiled,
)


def dequantize_rows(
    qdata: Tensor,
    metadata: Sequence[Tensor],
    cols: int,
    row_offset: int,
    dtype: torch.dtype,
    row_scale: Tensor | None = None,
) -> Tensor:
    """As `QuantizedTensor.dequantize_rows`."""
    ours = dequantizer is dequantize_nf4
    if not on_cpu(qdata) or (ours and not cols % BLOCK and selects_products(qdata, dtype)):
        return dequantize_at_once(qdata, metadata, cols, row_offset, dtype, row_scale)
    scales, offset = metadata
    codes, absmax_codes = qdata.split([-(-cols // 2), -(-cols // BLOCK)], dim=1)
    dynamic = table(DYNAMIC_LEVELS, qdata)
    first = row_offset * absmax_codes.size(1)
    products = absmax_products(absmax_codes, scales, dynamic, first)
    return dequantizer(codes, products, offset, cols, dtype, row_scale)


def selects_products(codes: Tensor, dtype: torch.dtype) -> bool:
    """Whether compiled code selects weights among the products of a block: to bf16 on CPUs."""
    return dtype == torch.bfloat16 and codes.numel() >= SMALLEST_COMPILED and on_cpu(codes)


# ---- two kernels on CPUs, but for bf16 ---------------------------------------------------------
# Absmax of every block, then weights. The first stores a product, the second adds the offset. The
# second also runs alone, for NF4 without double quantization (`nf4_fp32_absmax`).


def dequantize_nf4(
    codes: Tensor,
    products: Tensor,
    offset: Tensor,
    cols: int,
    dtype: torch.dtype,
    row_scale: Tensor | None,
) -> Tensor:
    """Weights `[rows, cols]` of `dtype`, computed in fp32 and rounded once, at the end.

    Args:
        codes: uint8 `[rows, ceil(cols/2)]`; rows need not be adjacent in memory.
        products: fp32 `[rows, blocks_per_row]`; products + offset (fp32 scalar) is the absmax.
        row_scale: fp32 `[rows]`, multiplied in before rounding, or None.
    """
    levels = table(NF4_LEVELS, codes)

    def write(rows: slice, codes: Tensor, scale: Tensor | None, out: Tensor) -> None:
        _write_weights(codes, products[rows], offset, scale, levels, out)

    by_blocks = selects_products(codes, dtype)
    return dequantize_pairs(write, codes, cols, dtype, row_scale, by_blocks=by_blocks)


dequantizer = dequantize_nf4  # in models that answer perhaps `nf4_by_bitsandbytes`


def absmax_of_blocks(absmax_codes: Tensor, scales: Tensor, dynamic: Tensor, first: int) -> Tensor:
    """Codes uint8 `[rows, blocks_per_row]` -> level * scale, fp32: absmax without the offset.
    `first`: the number of the first block, counted from where `scales` begin."""
    rows, per_row = absmax_codes.shape
    block = torch.arange(rows * per_row, device=absmax_codes.device).view(rows, per_row)
    return dynamic[absmax_codes.int()] * scales[(block + first) // SCALE_BLOCK]


absmax_products = partial(compiled, smallest=1 << 8)(absmax_of_blocks)


# By default inductor splits the selections of `nf4_levels` into several kernels.
ONE_KERNEL = FLAT_ON_GPUS | {
    "realize_opcount_threshold": 10_000,
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
}


@partial(compiled, options=ONE_KERNEL, static_on_gpus=True)
def _write_weights(
    codes: Tensor,
    products: Tensor,
    offset: Tensor,
    row_scale: Tensor | None,
    levels: Tensor,
    out: Tensor,
) -> None:
    """The kernel of `dequantize_nf4`; `out` holds two weights in each integer (`write_pairs`)."""
    _write_levels(codes, products + offset, row_scale, levels, out)


def _write_levels(
    codes: Tensor, absmax: Tensor, row_scale: Tensor | None, levels: Tensor, out: Tensor
) -> None:
    """Writes level * absmax of every code, in the kernels of both ways."""
    if row_scale is not None:
        absmax = absmax * row_scale.unsqueeze(1)
    absmax = absmax.unsqueeze(-1)
    if not torch.compiler.is_compiling():
        return write_uncompiled(NF4_PAIRS, codes, absmax, out)
    write_compiled(codes, absmax, levels, out)


# ---- one kernel on GPUs, and to bf16 on CPUs ---------------------------------------------------
# On GPUs it computes the absmax of a block anew for each weight. It takes 1/1.24 of the time of two
# kernels on an H200 (1/1.07 to 1/1.76; small weights gain most), and one launch. Compilers for GPUs
# would fuse the product and the sum of absmax into one operation, which rounds once.
# `ROUNDED_AS_ON_CPUS` keeps the bits of bitsandbytes. On CPUs it computes 16 products per block.


def dequantize_at_once(
    qdata: Tensor,
    metadata: Sequence[Tensor],
    cols: int,
    row_offset: int,
    dtype: torch.dtype,
    row_scale: Tensor | None,
) -> Tensor:
    """As `QuantizedTensor.dequantize_rows`."""
    scales, offset = metadata
    codes, absmax_codes = qdata.split([-(-cols // 2), -(-cols // BLOCK)], dim=1)
    tables = table(DYNAMIC_LEVELS, qdata), table(NF4_LEVELS, qdata)

    def write(rows: slice, codes: Tensor, scale: Tensor | None, out: Tensor) -> None:
        # Only the scales of these rows, so that all experts of a layer share one build.
        blocks = absmax_codes[rows]
        first = (row_offset + rows.start) * blocks.size(1)
        skip, last = first % SCALE_BLOCK, first + blocks.numel() - 1
        mine = scales[first // SCALE_BLOCK : last // SCALE_BLOCK + 1]
        write_at_once(codes, blocks, mine, offset, scale, *tables, skip, out)

    by_blocks = selects_products(codes, dtype)
    return dequantize_pairs(write, codes, cols, dtype, row_scale, by_blocks=by_blocks)


@partial(compiled, options=ONE_KERNEL | ROUNDED_AS_ON_CPUS, static_on_gpus=True)
def write_at_once(
    codes: Tensor,
    absmax_codes: Tensor,
    scales: Tensor,
    offset: Tensor,
    row_scale: Tensor | None,
    dynamic: Tensor,
    levels: Tensor,
    skip: int,
    out: Tensor,
) -> None:
    """`skip`: blocks of the first scale that are in earlier rows. `out` holds two weights in each
    integer (`write_pairs`)."""
    absmax = absmax_of_blocks(absmax_codes, scales, dynamic, skip) + offset
    _write_levels(codes, absmax, row_scale, levels, out)
