"""The solver of HQQ: scale and zero of groups of 64 weights, as in the `hqq` package 0.2.8.

    scale   a fifteenth of the group's range; 1 where that is below 1e-4, else at least 5e-5
    zero    -min / scale at first, then improved in up to 20 steps, which alternate between two
            parts of  min |e|_p + beta/2 |w - (code - zero) * scale - e|^2,  p = 0.7, beta = 10:
            e <- the error, shrunk towards 0;  zero <- mean(code - (w - e) / scale)
    stop    when the mean error of the whole weight, |w - (code - zero) * scale|, does not decrease

The published beta grows by kappa = 1.01 in every step. In the package's solver it is constant, and
here too. The package sums in fp32 in some order: 100 of SmolLM2's 1.7 M zeros (fp16) differ from
ours, and 76 of 106 M codes. Our sums are the same in any order (`_sums`), so results do not depend
on ranks, compilers or shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK, KERNEL_CHUNK
from qfsdp.tensor_subclasses.kernels import compiled as kernels
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.kernels.dispatch import ROUNDED_AS_ON_CPUS

LEVELS = 15  # the highest code
P, BETA, STEPS = 0.7, 10.0, 20
MIN_RANGE = 1e-4  # groups with a smaller range get scale 1
MAX_INVERSE = 2e4  # of 1 / scale, so that fp16 holds the scale
NEVER_SHRUNK = 0.17  # smaller errors become 0; `pow` takes 10 times as long as the rest of a step


def solve(groups: Tensor, mean_error: Callable[[Tensor], float]) -> tuple[Tensor, Tensor]:
    """The solver of HQQ.

    Args:
        groups: `[n, 64]`, floating point.
        mean_error: sums of absolute errors of these groups (fp64 `[n]`) -> mean error of the whole
            weight; called in every step.

    Returns:
        1 / scale and zero, fp32 `[n]`.
    """
    inverse, zero = (groups.new_empty(len(groups), dtype=torch.float32) for _ in range(2))
    mean, errors = (torch.empty_like(zero, dtype=torch.float64) for _ in range(2))
    # Uncompiled, temporaries are as large as the groups that are computed at a time.
    step = len(groups) if kernels.can_compile() else KERNEL_CHUNK // BLOCK
    parts = [slice(start, start + step) for start in range(0, len(groups), max(1, step))]
    for part in parts:
        inverse[part], zero[part], mean[part] = _start(groups[part])
    best = math.inf
    for _ in range(STEPS):
        for part in parts:
            given = (groups[part], inverse[part], zero[part])
            after, errors[part], largest = _step(*given, mean[part])
            if largest.amax() > NEVER_SHRUNK:
                after += _shrunk(*given)
            zero[part] = after
        error = mean_error(errors)
        if not error < best:  # also true for NaN
            break
        best = error
    return inverse, zero


@partial(compiled, options=ROUNDED_AS_ON_CPUS)
def _start(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 / scale, the first zero, and the mean of weight / scale (fp64) of every group."""
    low, high = groups.float().amin(1), groups.float().amax(1)
    span = high - low
    # `1 / span` would be a reciprocal, which code for GPUs does not round correctly.
    inverse = torch.where(span <= MIN_RANGE, 1.0, torch.ones_like(span) / span * LEVELS)
    inverse = inverse.clamp(max=MAX_INVERSE)
    zero = -low * inverse
    return inverse, zero, _sums(_levels(groups, inverse, zero)) / BLOCK - zero.double()


@partial(compiled, options=ROUNDED_AS_ON_CPUS)
def _step(
    groups: Tensor, inverse: Tensor, zero: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The next zero of every group without the term `_shrunk`, the sum of absolute errors of the
    current zero (both fp64), and the largest of these errors."""
    level = _levels(groups, inverse, zero)
    code = level.round().clamp(0, LEVELS)
    off = (code - level).abs()
    errors = _sums(off) / inverse.double()
    return code.sum(1).double() / BLOCK - mean, errors, off.amax(1) / inverse


@partial(compiled, options=ROUNDED_AS_ON_CPUS)
def _shrunk(groups: Tensor, inverse: Tensor, zero: Tensor) -> Tensor:
    """The mean of e / scale of every group, fp64."""
    level = _levels(groups, inverse, zero)
    off = level - level.round().clamp(0, LEVELS)
    size = off.abs() / inverse.unsqueeze(1)
    shrunk = (size - (1 / BETA) * size.pow(P - 1)).clamp(min=0) * off.sign()
    return _sums(shrunk * inverse.unsqueeze(1)) / BLOCK


def _levels(groups: Tensor, inverse: Tensor, zero: Tensor) -> Tensor:
    """weight / scale + zero, which is rounded to codes; fp32 `[n, 64]`."""
    return groups.float() * inverse.unsqueeze(1) + zero.unsqueeze(1)


def _sums(values: Tensor) -> Tensor:
    """Row sums, fp64 `[n]`, of fp32 `[n, 64]` with absolute values up to 15; equal in any order.

    Computed as two sums of integers below 2^24, which fp32 holds exactly. (Sums in fp64 or int32
    do not vectorize: 0.2 instead of 1.2 G weights/s per core.)
    """
    scaled = values * 2.0**10
    high = scaled.round()
    low = ((scaled - high) * 2.0**17).round()
    return high.sum(1).double() / 2.0**10 + low.sum(1).double() / 2.0**27


@partial(compiled, options=ROUNDED_AS_ON_CPUS)
def codes_of(groups: Tensor, inverse: Tensor, zero: Tensor) -> Tensor:
    """The codes of all weights, uint8 `[n, 64]`."""
    return _levels(groups, inverse, zero).round().clamp(0, LEVELS).to(torch.uint8)
