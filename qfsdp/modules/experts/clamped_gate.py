"""The activation of gpt-oss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class ClampedGate(torch.autograd.Function):
    """gpt-oss's `(up + 1) * gate * sigmoid(gain * gate)`, with gate at most `limit` and up between
    `-limit` and `limit`: `[..., inner]`.

    The gradient is written out, so that gate and up are all that is kept: autograd would keep six
    tensors of their size.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, gain: float) -> Tensor:
        ctx.limit, ctx.gain = limit, gain
        ctx.save_for_backward(gate, up)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gain * gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gate, up), limit, gain = ctx.saved_tensors, ctx.limit, ctx.gain
        clamped = gate.clamp(max=limit)
        share = torch.sigmoid(gain * clamped)
        of_gate = grad * (up.clamp(-limit, limit) + 1)
        of_gate = of_gate * share * (1 + gain * clamped * (1 - share)) * (gate <= limit)
        return of_gate, grad * clamped * share * (up.abs() <= limit), None, None
