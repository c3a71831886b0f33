"""Do two models differ on the same questions? Sign tests, and Holm's correction for many pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, fmean, stdev

LEVEL = 0.05  # of error, over all pairs together
Scores = Sequence[Sequence[float]]  # by seed, by question; higher is better


@dataclass(frozen=True)
class Pair:
    """Two models, the better one first.

    Fields:
        difference: of their mean scores, at least 0.
        interval: 95 %, normal, over questions; their scores are means over seeds.
        p: of the sign test over questions, corrected by Holm for all pairs.
        seeds: in how many seeds the better one is better.
        ordered: p is below 0.05, and the better one is better in every seed.
    """

    better: str
    worse: str
    difference: float
    interval: tuple[float, float]
    p: float
    seeds: int
    ordered: bool


def sign_test(more: int, fewer: int) -> float:
    """The two-sided p of `more` against `fewer`, ties left out, if both are equally likely.

    With one right or wrong answer per question it is McNemar's exact test.
    """
    total = more + fewer
    tail = sum(math.comb(total, k) for k in range(min(more, fewer) + 1))
    return min(1.0, 2 * tail / 2**total)


def holm(ps: Sequence[float]) -> list[float]:
    """The p of several tests, raised so that all together err at the level of one (Holm 1979)."""
    order = sorted(range(len(ps)), key=lambda at: ps[at])
    found, highest = [1.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, ps[at] * (len(ps) - rank)))
        found[at] = highest
    return found


def pairs(scores: Mapping[str, Scores]) -> list[Pair]:
    """All pairs of models, those with the smallest p first.

    Args:
        scores: of every model on the same questions. One seed of a model, such as an untrained
            one, stands beside every seed of the others.
    """
    means = {name: [fmean(of) for of in zip(*seeds, strict=True)] for name, seeds in scores.items()}
    ranked = sorted(means, key=lambda name: -fmean(means[name]))
    named, tests = list(combinations(ranked, 2)), []
    for one, other in named:
        apart = [a - b for a, b in zip(means[one], means[other], strict=True)]
        tests.append(sign_test(sum(d > 0 for d in apart), sum(d < 0 for d in apart)))
    found = [
        _pair(one, other, p, means, scores)
        for (one, other), p in zip(named, holm(tests), strict=True)
    ]
    return sorted(found, key=lambda pair: pair.p)


def _pair(
    one: str, other: str, p: float, means: Mapping[str, list[float]], scores: Mapping[str, Scores]
) -> Pair:
    apart = [a - b for a, b in zip(means[one], means[other], strict=True)]
    count = max(len(scores[one]), len(scores[other]))
    seeds = [list(scores[name]) * (count // len(scores[name])) for name in (one, other)]
    wins = sum(fmean(a) > fmean(b) for a, b in zip(*seeds, strict=True))
    ordered = p < LEVEL and wins == count
    half = NormalDist().inv_cdf(0.975) * stdev(apart) / math.sqrt(len(apart))
    middle = fmean(apart)
    return Pair(one, other, middle, (middle - half, middle + half), p, wins, ordered)
