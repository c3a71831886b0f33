"""Random numbers that depend on a text key alone, so they are the same on every rank."""

from __future__ import annotations

import random

import torch


def keyed_generator(key: str) -> torch.Generator:
    """A CPU generator seeded by `key`, such as "packing 0".

    The key is hashed. torch's CPU generator reads only 32 bits of its seed, and with sums such as
    seed + epoch, runs with neighbouring seeds would share their orders.
    """
    return torch.Generator().manual_seed(random.Random(key).getrandbits(32))


def shuffled_indices(size: int, key: str) -> torch.Tensor:
    """A permutation of 0 to `size - 1` that depends on `key`: int64 `[size]`."""
    return torch.randperm(size, generator=keyed_generator(key))
