"""Modules with parameters that are fp32 in a model of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

KEPT_FP32 = {"e_score_correction_bias", "A_log", "dt_bias"}
"""Names of parameters: routers' corrections, and the decays of recurrent layers."""


class KeepsFp32(nn.Module):
    """Casts of the model leave its own parameters in `KEPT_FP32` as they are."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = [p for name, p in self.named_parameters(recurse=False) if name in KEPT_FP32]

        def keeping(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            casts = made.dtype != tensor.dtype and any(tensor is one for one in kept)
            return tensor.to(made.device) if casts else made

        return super()._apply(keeping, recurse)
