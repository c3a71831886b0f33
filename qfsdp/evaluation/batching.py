"""Batches of sequences of different lengths, split over ranks, with a progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

from qfsdp.common.long_waits import long_wait
from qfsdp.common.progress import moved
from qfsdp.common.terminal import bar
from qfsdp.distributed.world import World

T = TypeVar("T")


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of up to `batch_size`, longest first.

    Sorting saves padding, and the batch that needs the most memory runs first. The batches do not
    depend on the number of ranks, so one rank runs the same arithmetic as many.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def batches_of_rank(batches: Sequence[list[int]], world: World, title: str) -> Iterator[list[int]]:
    """This rank's batches, with a progress bar. Neighbours in `batches` run at the same time.

    Every rank gets the same number of batches, because forward passes have collectives. Some ranks
    get an empty batch at the end.
    """
    starts = range(0, len(batches), world.size)
    for first in progress_bar(starts, title, world, len(starts)):
        yield batches[first + world.rank] if first + world.rank < len(batches) else []
        moved()


def progress_bar(items: Iterable[T], title: str, world: World, total: int) -> Iterator[T]:
    """Iterates over `items` and shows a progress bar on rank 0. If stderr is no terminal, a line
    says what takes long."""
    shown = bar(items, title, total, unit="batch", disable=world.rank != 0)
    with long_wait(title) if shown.disable else nullcontext():
        yield from shown
