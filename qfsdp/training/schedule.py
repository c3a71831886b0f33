"""Learning rate schedules that configs name, and whether one is as long as the run."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from qfsdp.common.errors import UserError
from qfsdp.common.terminal import warn
from qfsdp.config.component import Component

LENGTHS = ("num_training_steps", "T_max")
"""Arguments that say after how many updates a schedule ends. A cosine rises again after that, and
a line stays at 0: a run that is made longer would go on so."""


def cosine_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int | None,
    num_training_steps: int,
    warmup_ratio: float | None = None,
) -> LambdaLR:
    """A linear warm-up, then a half cosine from the full learning rate towards 0.

    Step n of the warm-up has n / `num_warmup_steps` of the full rate. torchtune's
    `get_cosine_schedule_with_warmup` has (n - 1) / `num_warmup_steps`: its first step changes
    nothing. After the warm-up both are equal.

    Args:
        num_warmup_steps: 0: no warm-up; null: as `warmup_ratio` says.
        num_training_steps: of the whole run; the recipe passes it.
        warmup_ratio: the share of the run that the warm-up takes, rounded up to whole steps; with
            `num_warmup_steps` the shorter of both, as few data make a run shorter than those.

    Raises:
        ValueError: `warmup_ratio` is not from 0 to 1.
    """
    if warmup_ratio is not None:
        if not 0 <= warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio {warmup_ratio}; expected a number from 0 to 1")
        most = math.ceil(warmup_ratio * num_training_steps)
        num_warmup_steps = most if num_warmup_steps is None else min(num_warmup_steps, most)
    warmup = num_warmup_steps or 0

    def share(steps_before: int) -> float:
        if steps_before < warmup:
            return (steps_before + 1) / warmup
        progress = (steps_before - warmup) / max(1, num_training_steps - warmup)
        return (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    return LambdaLR(optimizer, share)


def check_length(scheduler: Component | None, total_steps: int) -> None:
    """Warns of a schedule that ends before the run, of `total_steps` updates, does.

    Raises UserError: it is OneCycleLR, which refuses every further step, or has no length.
    """
    given = {} if scheduler is None else scheduler.kwargs
    for key in LENGTHS:
        if isinstance(length := given.get(key), int) and length < total_steps:
            past = f"rates after update {length} are past the schedule's end"
            told = f"lr_scheduler.{key}: {length}, and the run has {total_steps} updates"
            warn(f"{told}: {past}; expected {total_steps}")
    if scheduler is None or not scheduler.path.endswith(".OneCycleLR"):
        return
    length, epochs, updates = map(given.get, ("total_steps", "epochs", "steps_per_epoch"))
    if length is None and isinstance(epochs, int) and isinstance(updates, int):
        length = epochs * updates
    if not isinstance(length, int) or length < total_steps:
        told = f"lr_scheduler: {scheduler.path} has total_steps {length}, and the run"
        raise UserError(f"{told} {total_steps}; expected lr_scheduler.total_steps={total_steps}")
