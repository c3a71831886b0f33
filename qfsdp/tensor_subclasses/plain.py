"""Weights that are not quantized, as rows of bytes: they can be offloaded like quantized ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.quantized_tensor import GatherRows, QuantizedTensor

_DTYPE_BY_SIZE = {dtype.itemsize: dtype for dtype in (torch.bfloat16, torch.float32)}


class PlainRows(QuantizedTensor):
    """A frozen bf16, fp16 or fp32 weight: a row of bytes is the row of weights as stored."""

    format = "plain"

    @classmethod
    def empty(
        cls, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedTensor:
        if dtype not in (torch.float16, *_DTYPE_BY_SIZE.values()):
            raise TypeError(f"{cls.__name__}: dtype {dtype}; expected bfloat16, float16 or float32")
        qdata = torch.empty(rows, cols * dtype.itemsize, dtype=torch.uint8, device=device)
        return (PlainFp16Rows if dtype == torch.float16 else PlainRows)(qdata, [], cols, dtype)

    @classmethod
    def stored_dtype(cls, qdata: Tensor, cols: int) -> torch.dtype:
        """bf16 or fp32, in which the numbers are stored; the tensor's own dtype is what they are
        converted to."""
        return _DTYPE_BY_SIZE[qdata.size(1) // max(cols, 1)]

    @classmethod
    def dequantize_rows(
        cls,
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
    ) -> Tensor:
        """A view of `qdata`; new memory for a `row_scale` or another `dtype`."""
        weight = qdata.view(cls.stored_dtype(qdata, cols))
        return (weight if row_scale is None else weight * row_scale.unsqueeze(1)).to(dtype)

    def _quantize(
        self, pieces: Iterable[Tensor], name: str, gather_rows: GatherRows | None
    ) -> None:
        """Copies the rows. Not a collective: `gather_rows` is not called."""
        rows, at = self.qdata.view(self.stored_dtype(self.qdata, self.cols)), 0
        for piece in pieces:
            if not torch.isfinite(piece).all():
                raise ValueError(f"{name}: holds NaN or infinity")
            rows[at : at + len(piece)].copy_(piece)
            at += len(piece)


class PlainFp16Rows(PlainRows):
    """A frozen fp16 weight. It has a format of its own, as the bytes of a row look like bf16's."""

    format = "plain_fp16"

    @classmethod
    def stored_dtype(cls, qdata: Tensor, cols: int) -> torch.dtype:
        return torch.float16
