"""What every linear with an adapter has, of any method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class AdaptedLinear(nn.Module):
    """A frozen linear with an adapter, which subclasses add.

    Fields:
        weight: `[out, in]`, frozen, quantized or plain.
        bias: `[out]` or None, frozen.
        fp8: multiply by the weight in FP8.
        is_reference: compute what it computed at the start (`qfsdp.modules.adapters.reference`).
        start: frozen copies of the adapter's parameters at the start, by their names; empty: at
            the start the adapter changed nothing.
    """

    base_fields = ("weight", "bias", "e_score_correction_bias")  # all others are its adapter's

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.weight = base.weight.requires_grad_(False)
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)
        self.fp8 = getattr(base, "fp8", False)
        self.is_reference = False
        self.start = nn.ParameterDict()

    def _fp32(self, *shape: int) -> nn.Parameter:
        """An unset fp32 parameter on the weight's device."""
        return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=self.weight.device))


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """(name, module) of every adapted linear, in model order."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module
