"""The norms and the dense feed-forward of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.modules.low_rank.linear import outputs

if TYPE_CHECKING:
    from qfsdp.modules.decoder_config import DecoderConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


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


# ---- root mean square norms (arXiv:1910.07467), computed in fp32 ---------------------------------


class RMSNorm(nn.Module):
    """The norm of Llama: rounds to the input's dtype *before* the weight multiplies.

    `F.rms_norm(x, ..., weight)` rounds once, after it: bf16 logits would differ.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight


class RoundedOnceRMSNorm(nn.Module):
    """The norm of OLMo 2 and, with an offset of 1, of Gemma: rounds after the weight."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        normalised = F.rms_norm(x.float(), self.weight.shape, eps=self.eps)
        return (normalised * (self.weight.float() + self.offset)).to(x.dtype)
