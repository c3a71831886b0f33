"""Batches of things of many lengths, shared out over ranks, and a bar that tells how far it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

from qfsdp.distributed.world import World

T = TypeVar("T")


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of up to `batch_size`, longest first: little padding, and what does not
    fit into memory fails at once. Which are together does not depend on ranks, so that one rank
    runs the same arithmetic as many."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def batches_of_rank(batches: Sequence[list[int]], world: World, title: str) -> Iterator[list[int]]:
    """This rank's batch of every round: one each, neighbours in `batches`, under a bar.

    Every rank gets as many, as forward passes have collectives; where a last round is short it
    gets an empty one.
    """
    starts = range(0, len(batches), world.size)
    for first in progress_bar(starts, title, world, len(starts)):
        yield batches[first + world.rank] if first + world.rank < len(batches) else []


def progress_bar(items: Iterable[T], title: str, world: World, total: int) -> Iterable[T]:
    """`items`, with a progress bar on rank 0 if standard error is a terminal."""
    hidden = world.rank != 0 or not sys.stderr.isatty()
    return tqdm(items, title, total, unit="batch", disable=hidden, dynamic_ncols=True)
