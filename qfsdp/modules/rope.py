"""Rotary position embedding (arXiv:2104.09864) and its stretching for long contexts.

A pair of numbers of a head is turned by `position * frequency`, and each pair has its frequency. A
scaling changes the frequencies, so that a model reads positions that it was not trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import table


def _powers(theta: float | Tensor, dim: int, device: torch.device) -> Tensor:
    """theta ** (0, 2/dim, 4/dim, ...): fp32 `[..., dim // 2]`."""
    powers: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return powers


class Scaling(Protocol):
    """How frequencies are changed. `magnitude` multiplies rotated queries and keys; `by_length`:
    they depend on the length of a document."""

    @property
    def magnitude(self) -> float: ...

    @property
    def by_length(self) -> bool: ...

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        """Radians per position of each of `dim // 2` pairs: fp32 `[dim // 2]`, or `[batch or 1, seq
        or 1, 1, dim // 2]` if they depend on `lengths`, see `RopeConfig.tables`."""
        ...


@dataclass(frozen=True)
class Unscaled:
    """The frequencies of the paper."""

    magnitude: float = 1.0
    by_length: ClassVar[bool] = False

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        return 1.0 / _powers(theta, dim, lengths.device)


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor` (arXiv:2306.15595)."""

    factor: float
    magnitude: float = 1.0
    by_length: ClassVar[bool] = False

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        return 1.0 / _powers(theta, dim, lengths.device) / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    magnitude: float = 1.0
    by_length: ClassVar[bool] = False

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        inverse = 1.0 / _powers(theta, dim, lengths.device)
        # By a pair's turns within the original context: few (a low frequency) -> stretched,
        # many -> kept, between the two limits -> a linear ramp.
        turns = self.original_max_position_embeddings * inverse / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(inverse / self.factor, inverse, keep.clamp(0, 1))


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with documents longer than the model's context ("NTK-aware").

    Each document's length counts. transformers takes the longest row of a batch for all of them.
    """

    factor: float
    max_position_embeddings: int
    magnitude: float = 1.0
    by_length: ClassVar[bool] = True

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        longer = lengths.clamp(min=self.max_position_embeddings).double()
        growth = self.factor * longer / self.max_position_embeddings - (self.factor - 1)
        base = (theta * growth ** (dim / (dim - 2))).float()
        return 1.0 / _powers(base[..., None, None], dim, lengths.device)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): pairs that turn fast are kept, slow ones are divided by `factor`.

    Fields:
        beta_fast, beta_slow: turns within the original context from which a pair is kept, and up to
            which it is divided.
        truncate: the ramp between begins and ends at whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    by_length: ClassVar[bool] = False

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        powers = _powers(theta, dim, lengths.device)
        low, high = (self._pair(theta, dim, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float32, device=lengths.device)
        divided = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
        return divided / (self.factor * powers) + (1 - divided) / powers

    def _pair(self, theta: float, dim: int, turns: float) -> float:
        """The pair (a fraction of one counts) that turns so often within the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): a divisor for every pair, from `short_factor` in documents
    within the original context, from `long_factor` in longer ones.

    Each document's length counts. transformers takes the longest row of a batch for all of them.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    magnitude: float
    by_length: ClassVar[bool] = True

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        long = (lengths > self.original_max_position_embeddings)[..., None, None]
        longer, shorter = table(self.long_factor, lengths), table(self.short_factor, lengths)
        divisors = torch.where(long, longer, shorter)
        return 1.0 / (divisors * _powers(theta, dim, lengths.device))


@dataclass(frozen=True)
class QueryScaling:
    """Longer queries at far positions, so that attention stays sharp (Llama 4, Ministral 3):
    `1 + beta * log(1 + floor(position / context))`."""

    beta: float
    context: int

    def factors(self, positions: Tensor) -> Tensor:
        """fp32, of the shape of `positions`."""
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.context))


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a layer.

    Fields:
        theta: its base.
        scaling: how frequencies are changed.
        share: the part of a head that is rotated, its first numbers; the others are left alone.
        interleaved: neighbours are pairs (GLM). False: the numbers i and i + half are.
        query_scaling: what else multiplies queries.
    """

    theta: float = 10000.0
    scaling: Scaling = Unscaled()
    share: float = 1.0
    interleaved: bool = False
    query_scaling: QueryScaling | None = None

    def rotated(self, head_dim: int) -> int:
        """How many numbers of a head are rotated."""
        return int(head_dim * self.share)

    def tables(
        self, head_dim: int, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, for `attention.rotate`.

        Args:
            positions: int64 `[batch or 1, seq]`.
            lengths: int64 `[batch or 1, seq or 1]`, of the document that a token belongs to.

        Returns:
            Each `[batch or 1, seq, 1 or 2, rotated]` of `dtype`, computed in fp32: with 2, the
            first is for queries and the last for keys. The sine is negated where the rotation
            subtracts, at the first number of every pair.
        """
        inverse = self.scaling.inverse(self.theta, self.rotated(head_dim), lengths)
        angles = positions[:, :, None, None].float() * inverse
        cos, sin = angles.cos(), angles.sin()
        if self.scaling.magnitude != 1.0:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        if self.query_scaling is not None:
            factors = self.query_scaling.factors(positions)[:, :, None, None]
            cos, sin = (torch.cat((table * factors, table), dim=2) for table in (cos, sin))
        cos, sin = cos.to(dtype), sin.to(dtype)
        if self.interleaved:
            return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
