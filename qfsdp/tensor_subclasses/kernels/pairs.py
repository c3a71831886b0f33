"""Two neighbouring weights as one integer: how compiled kernels write the weights of a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.kernels.compiled import on_cpu

DTYPE_TO_INTEGER = {
    torch.bfloat16: torch.int32,
    torch.float16: torch.uint32,
    torch.float32: torch.int64,
    torch.float8_e4m3fn: torch.int16,
}
"""dtype of weights -> the integers that hold the bits of two neighbouring weights. They differ, so
that a kernel knows the dtype from its output."""
INTEGER_TO_DTYPE = {integer: dtype for dtype, integer in DTYPE_TO_INTEGER.items()}


def write_pairs(first: Tensor, second: Tensor, out: Tensor) -> None:
    """Writes the weights of every byte, fp32 `[rows, blocks, 32]` each, as one integer.

    Stores stay contiguous this way. Interleaving the halves of a byte with `stack` ran at 0.1
    (fp32) and 0.7 (bf16) G weights/s on a core with AVX-512 where pairs ran at 4.9.
    """
    if out.dtype == torch.int64:
        low, high = (half.view(torch.int32).long() for half in (first, second))
        pair = (low & 0xFFFFFFFF) | (high << 32)
    elif out.dtype == torch.int16:
        low, high = (
            half.to(torch.float8_e4m3fn).view(torch.uint8).int() for half in (first, second)
        )
        pair = ((high << 8) | low).to(torch.int16)
    elif out.dtype == torch.int32 and on_cpu(first):
        # Rounding to bf16 vectorizes on CPUs in integers only.
        low, high = (_rounded_to_bf16(half.view(torch.int32)) for half in (first, second))
        pair = (high & -65536) | ((low >> 16) & 65535)
    else:
        dtype = INTEGER_TO_DTYPE[out.dtype]
        low, high = (half.to(dtype).view(torch.int16).int() for half in (first, second))
        pair = ((high << 16) | (low & 65535)).view(out.dtype)
    out.copy_(pair.flatten(1))


def twice_in_bf16(numbers: Tensor) -> Tensor:
    """fp32 numbers -> int32 with the bits of the nearest bf16 in both halves."""
    bits = _rounded_to_bf16(numbers.view(torch.int32))
    return (bits & -65536) | ((bits >> 16) & 65535)


def _rounded_to_bf16(bits: Tensor) -> Tensor:
    """Bits of fp32 numbers (int32) -> bits whose upper half is the nearest bf16, ties to even."""
    return bits + 0x7FFF + ((bits >> 16) & 1)
