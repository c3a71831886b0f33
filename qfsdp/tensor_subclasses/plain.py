"""Weights that are not quantized, as rows of bytes: so they are offloaded like those that are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.quantized_tensor import GatherRows, QuantizedTensor

_DTYPES = {dtype.itemsize: dtype for dtype in (torch.bfloat16, torch.float32)}


class PlainRows(QuantizedTensor):
    """A frozen bf16 or fp32 weight: a row of bytes is the row of numbers, `dtype` is stored."""

    format = "plain"

    @classmethod
    def empty(
        cls, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedTensor:
        qdata = torch.empty(rows, cols * dtype.itemsize, dtype=torch.uint8, device=device)
        return cls(qdata, [], cols, dtype)

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
    ) -> Tensor:
        """The same memory, where neither `row_scale` nor another `dtype` asks for new numbers."""
        weight = qdata.view(_DTYPES[qdata.size(1) // cols])
        if row_scale is not None:
            weight = weight * row_scale.unsqueeze(1)
        return weight.to(dtype)

    def quantize_(
        self,
        weight: Tensor | Iterable[Tensor],
        name: str = "weight",
        gather_rows: GatherRows | None = None,
    ) -> None:
        """Copies the rows; each rank for itself."""
        rows, at = self.qdata.view(self.dtype), 0
        for piece in [weight] if isinstance(weight, Tensor) else weight:
            if not torch.isfinite(piece).all():
                raise ValueError(f"{name}: holds NaN or infinity")
            rows[at : at + len(piece)].copy_(piece)
            at += len(piece)
