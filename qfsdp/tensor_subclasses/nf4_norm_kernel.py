"""W A^T for DoRA's norms in one Triton kernel, which never writes the weight to memory.

A program has some rows. It goes through their blocks of 64 weights: dequantizes them in registers,
rounds them to the compute dtype, as forward does, and multiplies them by the same columns of A.

    byte c of a row holds columns 2c (high half) and 2c + 1 (low half), so a block is two products:
    [rows, 32] levels of high halves @ A[:, even columns]^T  +  those of low halves @ A[:, odd]^T

Dequantizing a weight and multiplying it by 16 rows of A moves 0.5 + 2 + 2 bytes a weight through
memory the usual way, and 0.5 here. Not yet timed on a GPU: `QFSDP_NORM_KERNEL=1` turns it on
(`qfsdp.modules.adapters.row_norms`). Importing this module needs Triton, which comes with PyTorch
for GPUs.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK, table
from qfsdp.tensor_subclasses.nf4 import NF4Tensor
from qfsdp.tensor_subclasses.nf4_levels import DYNAMIC_LEVELS, NF4_LEVELS, SCALE_BLOCK

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, for tests
SMALLEST = 16  # rows and columns of Triton's products
# At most so many rows: rows of a program. With 16, 32, 64 rows a weight takes 33, 23 and 17
# instructions of an H100 (rank 16; compiled and counted, not timed), but there must be enough
# programs for its 132 processors.
ROWS_OF_PROGRAM = ((2048, 16), (8192, 32))


def rows_of_program(rows: int, rank: int) -> int:
    """Rows of a program. With 64 of them, rank 128 takes 107 KB of shared memory for sm_89, of the
    99 that an RTX 4090 has."""
    at_once = next((size for most, size in ROWS_OF_PROGRAM if rows <= most), 64)
    return at_once if rank <= 64 else min(at_once, 32)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    qdata,
    a,
    out,
    scales,
    offset,
    dynamic,
    levels,
    rows,
    rank,
    first_block,
    stride,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """`out[r, k] = sum over c of W[r, c] * a[k, c]`, for `ROWS` rows of W."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_rank, byte = tl.arange(0, RANK), tl.arange(0, HALF)
    held, wanted = row < rows, at_rank < rank
    blocks: tl.constexpr = COLS // (2 * HALF)
    mean = tl.load(offset)
    total = tl.zeros((ROWS, RANK), dtype=tl.float32)
    of_row = qdata + row.to(tl.int64) * stride
    for block in range(blocks):
        code = tl.load(of_row + COLS // 2 + block, mask=held, other=0).to(tl.int32)
        scale = tl.load(scales + (first_block + row * blocks + block) // SCALE_BLOCK, mask=held)
        absmax = tl.load(dynamic + code) * scale + mean
        places = of_row[:, None] + (block * HALF + byte)[None, :]
        pair = tl.load(places, mask=held[:, None], other=0).to(tl.int32)
        high = (tl.load(levels + (pair >> 4)) * absmax[:, None]).to(DTYPE).to(FACTOR)
        low = (tl.load(levels + (pair & 15)) * absmax[:, None]).to(DTYPE).to(FACTOR)
        column = block * 2 * HALF + 2 * byte
        of_a = a + at_rank[None, :] * COLS + column[:, None]
        even = tl.load(of_a, mask=wanted[None, :], other=0.0).to(DTYPE).to(FACTOR)
        odd = tl.load(of_a + 1, mask=wanted[None, :], other=0.0).to(DTYPE).to(FACTOR)
        total = tl.dot(high, even, total, input_precision="ieee")
        total = tl.dot(low, odd, total, input_precision="ieee")
    places = out + row[:, None] * rank + at_rank[None, :]
    tl.store(places, total, mask=held[:, None] & wanted[None, :])


def frozen_products(weight: NF4Tensor, a: Tensor) -> Tensor:
    """`W @ a.T` of the rows that `weight` holds, fp32 `[rows, rank]`.

    Args:
        weight: its columns are a multiple of 64.
        a: fp32 `[rank, cols]`.
    """
    qdata, rank = weight.qdata, a.size(0)
    rows, cols = weight.shape
    dtype = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[weight.dtype]
    out = torch.empty(rows, rank, dtype=torch.float32, device=qdata.device)
    of_program = rows_of_program(rows, rank)
    _products[(triton.cdiv(rows, of_program),)](
        qdata,
        a.contiguous(),
        out,
        weight.scales,
        weight.offset,
        table(DYNAMIC_LEVELS, qdata),
        table(NF4_LEVELS, qdata),
        rows,
        rank,
        weight.row_offset * (cols // BLOCK),
        qdata.stride(0),
        COLS=cols,
        ROWS=of_program,
        RANK=max(SMALLEST, triton.next_power_of_2(rank)),
        HALF=BLOCK // 2,
        SCALE_BLOCK=SCALE_BLOCK,
        DTYPE=dtype,
        # Triton's interpreter multiplies the bits of bf16.
        FACTOR=tl.float32 if INTERPRETED else dtype,
    )
    return out
