"""Builds the optimizer and the learning rate schedule that the config names."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.common.devices import accelerator_count
from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line
from qfsdp.config.component import Component
from qfsdp.config.component_types import check_built, kind_at
from qfsdp.tensor_subclasses.kernels.ability import has_compiler, import_dynamo, why_not
from qfsdp.training.learning_rate import choose_lr as choose_lr
from qfsdp.training.local_steps import LocalSteps
from qfsdp.training.steps import backward as backward
from qfsdp.training.steps_in_backward import StepsInBackward

log = logging.getLogger("qfsdp")

TOTAL_STEPS = "num_training_steps"  # torchtune's name for the length of a schedule
MANY = 2**20  # steps of a schedule that is tried: more than those of any warm-up

# They update each element by itself, and their state in place: so local rows can be updated alone.
ELEMENTWISE: tuple[type[Optimizer], ...] = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
ELEMENTWISE += (optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.RMSprop)
ELEMENTWISE += (optim.Rprop,)


def build_optimizer(
    component: Component, parameters: Iterable[Tensor | dict[str, Any]], in_backward: bool = False
) -> Optimizer:
    """Builds the optimizer over `parameters`, its first argument.

    Args:
        parameters: or groups of them; `lr_ratio` of a group multiplies its learning rate.
        in_backward: update each parameter as soon as its gradient exists (`StepsInBackward`).

    Raises:
        UserError: it refuses its arguments or these parameters. A dry run builds it too.
    """
    optimizer: Optimizer = _tried("optimizer", component, lambda: component.call(list(parameters)))
    if type(optimizer).__module__.startswith("torchao.") and not has_compiler():
        log.warning("the optimizer runs uncompiled and slower: %s", why_not())
        torch.compiler.set_stance("force_eager")
    for group in optimizer.param_groups:
        if "lr_ratio" in group:
            group["lr"] = group["lr"] * group.pop("lr_ratio")
    every = [param for group in optimizer.param_groups for param in group["params"]]
    if any(isinstance(param, DTensor) for param in every):
        of_bitsandbytes = type(optimizer).__module__.startswith("bitsandbytes.")
        if isinstance(optimizer, optim.Adafactor) or of_bitsandbytes:  # they raise on DTensors
            found = f"{component.path} needs all rows of a weight, and ranks share them"
            others = "torch.optim.AdamW, or torchao.optim.AdamW8bit with states in 8 bits"
            raise UserError(f"optimizer: {found}; expected one rank, or such as {others}")
        if isinstance(optimizer, optim.Muon):
            log.warning(
                "%s adds up products of shards in bf16: an update of several ranks differs from "
                "that of one by about 2 %%",
                component.path,
            )
        if _is_elementwise(optimizer):
            LocalSteps(optimizer)
    return StepsInBackward(optimizer) if in_backward else optimizer


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a step on local rows equals a step on the whole parameters.

    torchao's optimizers count too: a block of 8-bit state lies on one rank. On DTensors their
    stochastic rounding raises, as it compares them with plain random numbers.
    """
    return type(optimizer) in ELEMENTWISE or type(optimizer).__module__ == "torchao.optim.adam"


def build_scheduler(
    component: Component | None, optimizer: Optimizer, total_steps: int
) -> LRScheduler | None:
    """Builds the schedule, which steps once per update.

    It gets `total_steps` if it has an argument `num_training_steps` that the config does not set.
    """
    if component is None:
        return None
    takes_total = TOTAL_STEPS in inspect.signature(component.resolve()).parameters
    if takes_total and TOTAL_STEPS not in component.kwargs:
        return component.call(optimizer, num_training_steps=total_steps)
    return component.call(optimizer)


def check_optimizer(
    optimizer: Component, scheduler: Component | None, lr_ratio: float | None = None
) -> None:
    """Builds both for a dummy parameter and steps, to find mistakes before anything is loaded.

    Args:
        lr_ratio: of a second group of parameters; None: there is one group.

    Raises:
        UserError: an unknown name or argument, a value that they refuse (a negative lr, a period
            of 0 steps), a `step` that needs an argument, such as the closure of L-BFGS, or a
            schedule that gives both groups the same rate.
    """
    optimizer.check("optimizer", provided=["params"])
    lr = optimizer.kwargs.get("lr", 0.0)
    if isinstance(lr, int | float) and not lr >= 0:  # told 0.7 s sooner than by the optimizer
        raise UserError(f"optimizer.lr: {lr}; expected a number of at least 0")
    import_dynamo()  # an optimizer needs it
    dummy = torch.nn.Parameter(torch.zeros(1, 1))

    groups: list[Any] = [dummy]
    if lr_ratio is not None:
        other = torch.nn.Parameter(torch.zeros(1, 1))
        groups = [{"params": [dummy]}, {"params": [other], "lr_ratio": lr_ratio}]

    def build() -> Optimizer:
        built = build_optimizer(optimizer, groups)
        on_gpu = optimizer.kwargs.get("capturable") and accelerator_count()  # steps only there
        of_torch = type(built).__module__.startswith("torch.optim")
        if of_torch and not on_gpu and "closure" not in _needed(built):
            dummy.grad = torch.zeros_like(dummy)
            built.step()  # SparseAdam refuses every gradient that is not sparse
            if not dummy.isfinite():  # 0 / 0; LoRA's A has a gradient of 0 at first
                found = f"{optimizer.path} makes {dummy.item()} of a weight whose gradient is 0"
                raise UserError(f"optimizer: {found}; expected an eps above 0")
        return built

    built = _tried("optimizer", optimizer, build)
    if scheduler is None:
        return
    provided = ["optimizer"] if TOTAL_STEPS in scheduler.kwargs else ["optimizer", TOTAL_STEPS]
    scheduler.check("lr_scheduler", provided=provided)

    def schedule() -> LRScheduler | None:
        begun = build_scheduler(scheduler, built, total_steps=MANY)
        if begun is not None and not _needed(begun):
            with warnings.catch_warnings(action="ignore"):  # not every optimizer has made a step
                begun.step()
        return begun

    _tried("lr_scheduler", scheduler, schedule)
    first, *more = [float(group["lr"]) for group in built.param_groups]
    if more == [first] and first > 0 and lr_ratio != 1:
        found = f"{scheduler.path} sets the rate of B itself, and adapter.lora_plus_ratio is lost"
        raise UserError(f"lr_scheduler: {found}; expected a schedule of factors of optimizer.lr")


def _tried(key: str, component: Component, build: Callable[[], Any]) -> Any:
    """What `build` returns, if a recipe can use it."""
    try:
        built = build()
    except UserError:
        raise
    except Exception as error:  # a constructor may raise anything
        reason = first_line(error)
        raise UserError(f"{key}: {component.path} refuses its arguments: {reason}") from None
    check_built(key, component.path, built, kind_at(key))
    for name in _needed(built):
        needs = f"needs '{name}' in every step"
        raise UserError(f"{key}: {component.path} {needs}; expected a step without arguments")
    return built


def _needed(built: Optimizer | LRScheduler) -> list[str]:
    """The arguments without which `step` cannot be called."""
    arguments = inspect.signature(built.step).parameters.values()
    by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [a.name for a in arguments if a.default is a.empty and a.kind is by_place]
