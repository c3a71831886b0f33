"""Modules with parameters that are fp32 in a model of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn


class KeepsFp32(nn.Module):
    """Casts of the model leave the parameters named in `kept_fp32` as they are."""

    kept_fp32: ClassVar[tuple[str, ...]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = [getattr(self, name) for name in self.kept_fp32]

        def keeping(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            casts = made.dtype != tensor.dtype and any(tensor is one for one in kept)
            return tensor.to(made.device) if casts else made

        return super()._apply(keeping, recurse)
