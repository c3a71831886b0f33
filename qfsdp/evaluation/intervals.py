"""Confidence intervals of scores: the range to expect on other rows of the same kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

CONFIDENCE_LEVEL = 0.95

Interval = tuple[float, float]


def wilson(hits: int, total: int, level: float = CONFIDENCE_LEVEL) -> Interval:
    """The Wilson score interval of a proportion (J. Am. Stat. Assoc. 22, 209, 1927).

    Unlike the normal interval it stays within 0 and 1 and has a width at 0 % and 100 % hits. For
    `total` 0 it is (0, 1).
    """
    if total == 0:
        return 0.0, 1.0
    z = _quantile(level)
    p, weight = hits / total, z * z / total
    middle = (p + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(p * (1 - p) / total + weight / total / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> Interval:
    """The normal interval of a mean. Wilson's if all values are 0 or 1. NaN for one value."""
    if all(value in (0, 1) for value in values):
        return wilson(round(sum(values)), len(values), level)
    if len(values) < 2:
        return math.nan, math.nan
    half = _quantile(level) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def loss_interval(parts: Sequence[tuple[float, int]], level: float = CONFIDENCE_LEVEL) -> Interval:
    """The normal interval of a mean loss per token, from the spread between parts of the data.

    Tokens of one text are not independent, so the parts (batches, windows) are the sampled units.
    The variance is that of a ratio of two sums (W. G. Cochran, Sampling Techniques, section 6.3).
    NaN for fewer than two parts with targets.

    Args:
        parts: summed loss and number of targets of each part.
    """
    parts = [part for part in parts if part[1]]
    if len(parts) < 2:
        return math.nan, math.nan
    tokens = sum(count for _, count in parts)
    mean = math.fsum(loss for loss, _ in parts) / tokens
    squares = math.fsum((loss - mean * count) ** 2 for loss, count in parts)
    error = math.sqrt(squares * len(parts) / (len(parts) - 1)) / tokens
    half = _quantile(level) * error
    return mean - half, mean + half


def _quantile(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2)
