"""The numbers that NF4's codes stand for; the format is described in `nf4.py`."""

from __future__ import annotations

import torch

SCALE_BLOCK = 256  # absmax values per second-level scale

# The 16 levels, published by the authors of QLoRA (appendix E); exact in fp32.
# fmt: off
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
NF4_PAIRS = tuple(level for high in NF4_LEVELS for low in NF4_LEVELS for level in (high, low))
"""The two levels of each byte, one after the other."""


def _dynamic_levels() -> list[float]:
    """The 256 levels of the signed dynamic 8-bit type (https://arxiv.org/abs/1511.04561):
    2**e fractions per decade 10**(e - 6) for e = 0..6, both signs, and 0 and 1."""
    levels = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1.0, 2**e + 1, dtype=torch.float32)
        centres = (10.0 ** (e - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        levels += centres.tolist() + (-centres).tolist()
    return sorted(levels)


DYNAMIC_LEVELS = tuple(_dynamic_levels())
