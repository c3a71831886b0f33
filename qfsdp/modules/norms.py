"""Root mean square norms (arXiv:1910.07467), computed in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NormConfig:
    """What the norms of a decoder compute.

    Fields:
        eps: added to the mean square.
        rounds_once: the weight multiplies in fp32, and the product is rounded to the input's dtype.
            False: the normalised value is rounded before the weight multiplies it, as in Llama.
        offset: added to the weight: 1 for Gemma, whose checkpoints hold the difference from 1.
    """

    eps: float = 1e-6
    rounds_once: bool = False
    offset: float = 0.0

    def build(self, size: int) -> nn.Module:
        """A norm over the last `size` numbers."""
        if self.rounds_once:
            return RoundedOnceRMSNorm(size, self.eps, self.offset)
        return RMSNorm(size, self.eps)


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
