"""What this package tells a dry run: the memory estimate (`qfsdp.planning`), which computes
nothing.

A dry run executes a train step on fake tensors. All of them are CPU tensors, whatever device the
estimate is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

Way = Literal["to_device", "to_host", "from_disk"]


class DryRun(Protocol):
    """The follower of a dry run (`qfsdp.planning.tracker.MemoryTracker`).

    Fields:
        target: device type that the estimate is for.
    """

    target: Literal["cpu", "cuda"]

    def results_only(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns `fn(*args, **kwargs)` and counts only its results: compiled code keeps no
        intermediates."""

    def in_host_memory(self, tensor: torch.Tensor) -> None:
        """The storage of `tensor` is host memory, not the target's."""

    def moved(self, way: Way, size: int) -> None:
        """`size` bytes are copied in the given direction."""


current: DryRun | None = None
"""The dry run that is going on; None in a real run."""


@contextmanager
def following(dry_run: DryRun) -> Iterator[None]:
    """Makes `dry_run` the current one in a `with` block."""
    global current
    before, current = current, dry_run
    try:
        yield
    finally:
        current = before
