"""What formats with 4-bit codes and blocks of 64 share: two codes in a byte, and back.

A row begins with `ceil(cols/2)` bytes of codes, the first of each two in the high half. Where 64
does not divide `cols`, the last block of every row is shorter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import qfsdp.tensor_subclasses.kernels.compiled
from qfsdp.tensor_subclasses.kernels.compiled import compiled

BLOCK = 64
CHUNK_WEIGHTS = 1 << 21  # weights worked on at a time: temporaries of 30 MB, 110 uncompiled

WIDE = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
"""Integers that hold the bits of two neighbouring weights."""

WriteRows = Callable[[slice, Tensor, Tensor | None, Tensor], None]
"""Writes the weights of some rows: `(which rows, their codes uint8 [n, blocks * 32], row_scale fp32
[n] or None, out)`, where `out` holds integers `[n, cols/2]` of two weights each (`write_pairs`)."""


@compiled
def pack_pairs(codes: Tensor) -> Tensor:
    """Codes uint8 `[rows, cols]` -> two in a byte, the first high, `[rows, cols/2]`.

    A kernel of its own, on pairs of bytes as 16-bit numbers: taking even and odd codes apart where
    they are computed kept that from vectorizing, 138 against 780 M weights/s per core.
    """
    pairs = codes.view(torch.int16)
    return (((pairs & 15) << 4) | (pairs >> 8)).to(torch.uint8)


def dequantize_pairs(
    write: WriteRows,
    codes: Tensor,
    cols: int,
    dtype: torch.dtype,
    row_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Weights `[rows, cols]` of `dtype`, computed in fp32 and rounded once, at the end.

    Args:
        write: a format's own kernel, with the scales of its blocks at hand.
        codes: uint8 `[rows, ceil(cols/2)]`, rows may be apart from each other.
        row_scale: fp32 `[rows]`, multiplied in before rounding, or None.
        out: where to write them, contiguous `[rows, cols]` of `dtype`; None: new memory.
    """
    rows = codes.size(0)
    if out is None:
        out = codes.new_empty(rows, cols, dtype=dtype)
    wide = WIDE.get(dtype)
    if wide is None or cols % BLOCK:
        padded = -(-cols // BLOCK) * BLOCK
        codes = F.pad(codes, (0, padded // 2 - codes.size(1)))
        whole = dequantize_pairs(write, codes, padded, torch.float32, row_scale, None)
        return out.copy_(whole[:, :cols])
    # Uncompiled, intermediates are as large as what is worked on at a time.
    step = (
        rows
        if qfsdp.tensor_subclasses.kernels.compiled.can_compile()
        else max(1, CHUNK_WEIGHTS // cols)
    )
    for start in range(0, rows, step):
        part = slice(start, start + step)
        scale = None if row_scale is None else row_scale[part]
        write(part, codes[part], scale, out[part].view(wide))
    return out


def write_pairs(first: Tensor, second: Tensor, out: Tensor) -> None:
    """Writes the weights of every byte, fp32 `[rows, blocks, 32]` each, as one integer.

    Stores stay contiguous so: 4.9 G weights/s per core (AVX-512), against 0.1 (fp32) and 0.7 (bf16)
    when the halves of a byte are interleaved with `stack`. Rounding vectorizes on CPUs in whole
    numbers; GPUs have an instruction for it.
    """
    if out.dtype != torch.int32:
        low, high = (half.view(torch.int32).long() for half in (first, second))
        pair = (low & 0xFFFFFFFF) | (high << 32)
    elif first.device.type == "cpu":
        low, high = (_round_to_bf16(half.view(torch.int32)) for half in (first, second))
        pair = (high & -65536) | ((low >> 16) & 65535)
    else:
        low, high = (half.bfloat16().view(torch.int16).int() for half in (first, second))
        pair = (high << 16) | (low & 65535)
    out.copy_(pair.flatten(1))


def _round_to_bf16(bits: Tensor) -> Tensor:
    """Bits of finite fp32 numbers (int32) -> the same, whose upper half is the nearest bf16."""
    return bits + 0x7FFF + ((bits >> 16) & 1)
