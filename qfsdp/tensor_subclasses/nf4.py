"""NF4: 4-bit NormalFloat with double quantization, bit for bit as bitsandbytes computes it.

Format of QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314):

    block      64 consecutive weights of a row share one scale, absmax = max |w|
    code       4 bits, the nearest of 16 levels to w / absmax; two codes in a byte, the first in
               the high half
    absmax     quantized to 8 bits as well: the code of the nearest of 256 "dynamic" levels to
               (absmax - offset) / scale, with one offset for the weight (the mean absmax)
               and one fp32 scale per 256 blocks, counted over the whole weight row by row

    row of bytes:  [ cols/2 bytes of codes | cols/64 bytes of absmax codes ]
    metadata:      scales  fp32 [ceil(blocks / 256)],  offset  fp32 []

That is 4.127 bits a weight. bitsandbytes keeps the same codes in separate flat arrays; splitting or
joining rows converts one layout into the other without rounding. If 64 does not divide `cols`, the
last block of every row is shorter. bitsandbytes lets blocks continue in the next row then, so such
weights cannot be exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.nf4_dequantize import dequantize_rows
from qfsdp.tensor_subclasses.nf4_levels import SCALE_BLOCK
from qfsdp.tensor_subclasses.nf4_quantize import quantize_nf4
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


class NF4Tensor(QuantizedTensor):
    """A weight in NF4; the module's docstring describes the bytes of a row and the metadata."""

    format = "nf4"
    metadata_names = ("scales", "offset")
    scales: Tensor
    offset: Tensor
    _quantize = quantize_nf4
    dequantize_rows = staticmethod(dequantize_rows)

    @staticmethod
    def row_bytes(cols: int) -> int:
        return -(-cols // 2) + -(-cols // BLOCK)

    @staticmethod
    def metadata_shapes(rows: int, cols: int) -> list[tuple[int, ...]]:
        blocks = rows * -(-cols // BLOCK)
        return [(-(-blocks // SCALE_BLOCK),), ()]


def quantize(weight: Tensor, dtype: torch.dtype | None = None) -> QuantizedTensor:
    """A whole plain weight `[rows, cols]` as NF4 on the same device.

    Args:
        weight: floating point.
        dtype: compute dtype of the result; default: the dtype of `weight`.

    Raises:
        TypeError, ValueError: `weight` is not a finite floating-point matrix.
    """
    if weight.dim() != 2:
        raise ValueError(f"quantize: a weight {list(weight.shape)}; expected [rows, cols]")
    rows, cols = weight.shape
    target = NF4Tensor.empty(rows, cols, dtype or weight.dtype, weight.device)
    target.quantize_(weight)
    return target
