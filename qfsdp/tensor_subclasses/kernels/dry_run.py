"""TODO tensor_subclasses.kernels.dry_run."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class DryRun(Protocol):
    """What follows memory where nothing is computed (`qfsdp.memory`), on tensors that all are of
    the CPU: `target` says what they stand for."""

    target: str

    def results_only(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`fn(*args, **kwargs)`, of whose memory only the result counts: as compiled."""


dry_run: DryRun | None = None


def on_cpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is, or in a dry run stands for, one of the CPU."""
    return tensor.device.type == "cpu" if dry_run is None else dry_run.target == "cpu"
