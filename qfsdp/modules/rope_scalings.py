"""Stretchings of rotary embeddings for long contexts; `rope` applies them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from qfsdp.modules.rope import Scaling, powers
from qfsdp.tensor_subclasses.four_bit import table


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """All frequencies divided by `factor` (arXiv:2306.15595)."""

    factor: float

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        return 1.0 / powers(theta, dim, lengths.device) / self.factor


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        inverse = 1.0 / powers(theta, dim, lengths.device)
        # By a pair's turns within the original context: few (a low frequency) -> stretched,
        # many -> kept, between the two limits -> a linear ramp.
        turns = self.original_max_position_embeddings * inverse / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(inverse / self.factor, inverse, keep.clamp(0, 1))


@dataclass(frozen=True)
class DynamicScaling(Scaling):
    """A base that grows with documents longer than the model's context ("NTK-aware").

    Each document's length counts. transformers takes the longest row of a batch for all of them.
    """

    factor: float
    max_position_embeddings: int
    by_length: ClassVar[bool] = True

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        longer = lengths.clamp(min=self.max_position_embeddings).double()
        growth = self.factor * longer / self.max_position_embeddings - (self.factor - 1)
        base = (theta * growth ** (dim / (dim - 2))).float()
        return 1.0 / powers(base[..., None, None], dim, lengths.device)


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN (arXiv:2309.00071): pairs that turn fast are kept, slow ones are divided by `factor`.

    Fields:
        beta_fast, beta_slow: turns within the original context from which a pair is kept, and up to
            which it is divided.
        truncate: the ramp between begins and ends at whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    magnitude: float = field()  # no default, which it would take from its base
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        all_powers = powers(theta, dim, lengths.device)
        low, high = (self._pair(theta, dim, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float32, device=lengths.device)
        divided = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
        return divided / (self.factor * all_powers) + (1 - divided) / all_powers

    def _pair(self, theta: float, dim: int, turns: float) -> float:
        """The pair (a fraction of one counts) that turns so often within the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))


@dataclass(frozen=True)
class LongRopeScaling(Scaling):
    """LongRoPE (arXiv:2402.13753): a divisor for every pair, from `short_factor` in documents
    within the original context, from `long_factor` in longer ones.

    Each document's length counts. transformers takes the longest row of a batch for all of them.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    magnitude: float = field()  # no default, which it would take from its base
    by_length: ClassVar[bool] = True

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        long = (lengths > self.original_max_position_embeddings)[..., None, None]
        longer, shorter = table(self.long_factor, lengths), table(self.short_factor, lengths)
        divisors = torch.where(long, longer, shorter)
        return 1.0 / (divisors * powers(theta, dim, lengths.device))


@dataclass(frozen=True)
class QueryScaling:
    """Longer queries at far positions, so that attention stays sharp (Llama 4, Ministral 3):
    `1 + beta * log(1 + floor(position / context))`."""

    beta: float
    context: int

    def factors(self, positions: Tensor) -> Tensor:
        """fp32, of the shape of `positions`."""
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.context))
