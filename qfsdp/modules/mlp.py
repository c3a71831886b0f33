"""The dense feed-forward of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.low_rank.grouped import outputs

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


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


class MLP(nn.Module):
    """Gated feed-forward (arXiv:2002.05202): SwiGLU or GeGLU, see `MLPConfig`."""

    def __init__(self, config: DecoderConfig, inner: int | None = None) -> None:
        super().__init__()
        part, hidden, inner = config.mlp, config.hidden_size, inner or config.intermediate_size
        self.inner, self.outer, self.activation = part.inner, part.outer, part.activation
        size = 2 * inner // len(part.inner)
        for name in part.inner:
            setattr(self, name, nn.Linear(hidden, size, bias=part.bias))
        setattr(self, part.outer, nn.Linear(inner, hidden, bias=part.bias))

    def forward(self, x: Tensor) -> Tensor:
        made = outputs(x, [getattr(self, name) for name in self.inner])
        gate, up = made if len(made) == 2 else made[0].chunk(2, dim=-1)
        y: Tensor = getattr(self, self.outer)(ACTIVATIONS[self.activation](gate) * up)
        return y

    def stages(self) -> list[tuple[Fraction, list[nn.Module]]]:
        """Linears with the same input, in the order in which they run, and the share of their rows
        that a token multiplies."""
        linears = [[getattr(self, name) for name in self.inner], [getattr(self, self.outer)]]
        return [(Fraction(1), same_input) for same_input in linears]
