"""Shared by formats with 4-bit codes and blocks of weights in a row: two codes in a byte.

A row begins with `ceil(cols/2)` bytes of codes, the first of each pair in the high half (MXFP4: in
the low half). Blocks have 64 weights (MXFP4: 32); if that does not divide `cols`, the last block of
every row is shorter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.tensor_subclasses.kernels import compiled as kernels
from qfsdp.tensor_subclasses.kernels.pairs import DTYPE_TO_INTEGER, INTEGER_TO_DTYPE

BLOCK = 64
KERNEL_CHUNK = 1 << 21  # weights computed at a time: temporaries of 30 MB, 110 uncompiled

WriteRows = Callable[[slice, Tensor, Tensor | None, Tensor], None]
"""Writes the weights of some rows: `(rows, codes uint8 [n, blocks * 32], row_scale fp32 [n] or
None, out)`; `out` are integers `[n, cols/2]` that hold two weights each (`write_pairs`)."""


def table(values: tuple[float, ...], like: Tensor) -> Tensor:
    """fp32 constants on the device of `like`, cached unless `like` is a fake or meta tensor."""
    if type(like) is Tensor and like.device.type != "meta":
        return _constants(values, like.device)
    return torch.tensor(values, dtype=torch.float32, device=like.device)


@functools.cache
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def dequantize_pairs(
    write: WriteRows,
    codes: Tensor,
    cols: int,
    dtype: torch.dtype,
    row_scale: Tensor | None,
    block: int = BLOCK,
    by_blocks: bool = False,
) -> Tensor:
    """Weights `[rows, cols]` of `dtype`, computed in fp32 and rounded once, at the end.

    Args:
        write: the kernel of a format; it knows the scales of the blocks.
        codes: uint8 `[rows, ceil(cols/2)]`; rows need not be adjacent in memory.
        row_scale: fp32 `[rows]`, multiplied in before rounding, or None.
        block: weights that share a scale.
        by_blocks: `write` takes `out` as `[n, blocks, block/2]` where `block` divides `cols`, and
            has temporaries even if it is compiled.
    """
    rows, integer = codes.size(0), DTYPE_TO_INTEGER.get(dtype)
    if integer is None or cols % block:
        padded = -(-cols // block) * block
        codes = F.pad(codes, (0, padded // 2 - codes.size(1)))
        weight = dequantize_pairs(write, codes, padded, torch.float32, row_scale, block)
        return weight[:, :cols].to(dtype).contiguous()
    out = codes.new_empty(rows, cols, dtype=dtype)
    # Temporaries are as large as the rows that are computed at a time.
    whole = kernels.can_compile() and not by_blocks
    step = max(1, rows if whole else KERNEL_CHUNK // cols)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        scale = None if row_scale is None else row_scale[part]
        held = out[part].view(integer)
        write(part, codes[part], scale, held.unflatten(1, (-1, block // 2)) if by_blocks else held)
    return out


def write_uncompiled(pairs: tuple[float, ...], codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """`write_pairs` where every operation is a pass over memory: looks up both levels of a byte at
    once in a table of 256. 1.1 ms for 1536 x 576 weights against 9.4 for two tables of 16 (bf16,
    NF4, one core with AVX-512); without a C++ compiler that is a third of a train step of SmolLM2.

    Args:
        pairs: the two levels of each byte, one after the other.
        codes: uint8 `[rows, blocks * block / 2]`.
        scale: fp32 `[rows, blocks, 1]`.
    """
    both = table(pairs, codes).view(torch.int64)
    found = both.index_select(0, codes.flatten().int()).view(torch.float32)
    weights = found.view(*scale.shape[:2], -1).mul_(scale)
    out = out.view(INTEGER_TO_DTYPE[out.dtype])
    out.copy_(weights.view(out.shape))
