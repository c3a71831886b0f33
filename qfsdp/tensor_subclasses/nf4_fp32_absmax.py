"""NF4 without double quantization: absmax stays in fp32, 4.5 bits a weight.

    row of bytes:  [ cols/2 bytes of codes | cols/64 absmax, fp32 in 4 bytes each ]

bitsandbytes writes this format with `bnb_4bit_use_double_quant: false`. It has no metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.nf4_dequantize import dequantize_nf4
from qfsdp.tensor_subclasses.nf4_quantize import check_finite, write_codes
from qfsdp.tensor_subclasses.quantized_tensor import GatherRows, QuantizedTensor, numbers_of


class NF4Fp32AbsmaxTensor(QuantizedTensor):
    """A weight in NF4 without double quantization."""

    format = "nf4_fp32_absmax"

    @staticmethod
    def row_bytes(cols: int) -> int:
        return -(-cols // 2) + 4 * -(-cols // BLOCK)

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
    ) -> Tensor:
        codes, absmax = qdata.split([-(-cols // 2), 4 * -(-cols // BLOCK)], dim=1)
        absmax = numbers_of(absmax, torch.float32)
        no_offset = absmax.new_zeros(())
        return dequantize_nf4(codes, absmax, no_offset, cols, dtype, row_scale)

    def _quantize(
        self, pieces: Iterable[Tensor], name: str, gather_rows: GatherRows | None
    ) -> None:
        absmax = write_codes(pieces, self.qdata)
        check_finite(absmax if gather_rows is None else gather_rows(absmax), name)
        self.qdata[:, -4 * absmax.size(1) :] = absmax.view(torch.uint8)
