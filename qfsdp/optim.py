"""Optimizers and learning rate schedules named in the config."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.config import Component
from qfsdp.errors import UserError

TOTAL_STEPS = "num_training_steps"  # torchtune's name for the length of a schedule


def build_optimizer(component: Component, parameters: Iterable[Tensor]) -> Optimizer:
    """The optimizer over `parameters`, which are its first argument."""
    return component.build(list(parameters))


def build_scheduler(
    component: Component | None, optimizer: Optimizer, total_steps: int
) -> LRScheduler | None:
    """The schedule, stepped once per update; told `total_steps` if it takes
    `num_training_steps` and the config does not give it."""
    if component is None:
        return None
    takes_total = TOTAL_STEPS in inspect.signature(component.resolve()).parameters
    if takes_total and TOTAL_STEPS not in component.kwargs:
        return component.build(optimizer, num_training_steps=total_steps)
    return component.build(optimizer)


def check_optimizer(optimizer: Component, scheduler: Component | None) -> None:
    """Builds both for one spare number: what they refuse is found before anything is loaded.

    Raises:
        UserError: an unknown name or argument, or a value that they refuse (a negative lr).
    """
    optimizer.check("optimizer", provided=["params"])
    spare = torch.nn.Parameter(torch.zeros(1, 1))
    try:
        built = build_optimizer(optimizer, [spare])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"optimizer: {optimizer.path} refuses its arguments: {error}") from None
    if scheduler is None:
        return
    provided = ["optimizer"] if TOTAL_STEPS in scheduler.kwargs else ["optimizer", TOTAL_STEPS]
    scheduler.check("lr_scheduler", provided=provided)
    try:
        build_scheduler(scheduler, built, total_steps=1)
    except (TypeError, ValueError) as error:
        raise UserError(f"lr_scheduler: {scheduler.path} refuses its arguments: {error}") from None
