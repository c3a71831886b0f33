"""Weights that are not quantized, as rows of bytes: they can be offloaded like quantized ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.quantized_tensor import GatherRows, QuantizedTensor

_DTYPE_BY_SIZE = {dtype.itemsize: dtype for dtype in (torch.bfloat16, torch.float32)}


class PlainRows(QuantizedTensor):
    """A frozen bf16 or fp32 weight: a row of bytes is the row of weights as stored."""

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
        """A view of `qdata`; new memory for a `row_scale` or another `dtype`."""
        weight = qdata.view(_DTYPE_BY_SIZE[qdata.size(1) // cols])
        if row_scale is not None:
            weight = weight * row_scale.unsqueeze(1)
        return weight.to(dtype)

    def quantize_(
        self,
        weight: Tensor | Iterable[Tensor],
        name: str = "weight",
        gather_rows: GatherRows | None = None,
    ) -> None:
        """Copies the rows. Not a collective: `gather_rows` is not called."""
        rows, at = self.qdata.view(self.dtype), 0
        for piece in [weight] if isinstance(weight, Tensor) else weight:
            if not torch.isfinite(piece).all():
                raise ValueError(f"{name}: holds NaN or infinity")
            rows[at : at + len(piece)].copy_(piece)
            at += len(piece)
