"""Confidence intervals: known values and coverage."""

from __future__ import annotations

import math

import pytest
import torch

from qfsdp.evaluation.intervals import loss_interval, mean_interval, wilson


def test_wilson_against_scipy() -> None:
    # scipy.stats.binomtest(hits, total).proportion_ci(level, "wilson"), to four places.
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(20, 20) == pytest.approx((0.8389, 1.0), abs=5e-5)
    assert wilson(50, 100, level=0.9) == pytest.approx((0.4188, 0.5812), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def test_means() -> None:
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    low, high = mean_interval([0.2, 0.4, 0.6])
    assert (low + high) / 2 == pytest.approx(0.4)
    assert high - low == pytest.approx(2 * 1.959964 * 0.2 / math.sqrt(3), rel=1e-6)
    assert all(map(math.isnan, mean_interval([0.3])))


def test_loss_interval_of_equal_parts_is_that_of_a_mean() -> None:
    means = [1.0, 1.2, 0.9, 1.4]
    found = loss_interval([(7 * mean, 7) for mean in means])
    assert found == pytest.approx(mean_interval(means))
    assert all(map(math.isnan, loss_interval([(3.0, 2), (0.0, 0)])))


def test_95_of_100_intervals_contain_the_true_loss() -> None:
    """Parts of 1 to 40 tokens with correlated losses and a mean of 2.0 per token."""
    generator = torch.Generator().manual_seed(0)
    held, runs = 0, 1000
    for _ in range(runs):
        counts = torch.randint(1, 41, (60,), generator=generator)
        shared = torch.randn(60, generator=generator, dtype=torch.float64)
        losses = counts * (2.0 + 0.5 * shared)
        low, high = loss_interval(list(zip(losses.tolist(), counts.tolist(), strict=True)))
        held += low < 2.0 < high
    assert 0.92 <= held / runs <= 0.97
