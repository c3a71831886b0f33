"""Several adapters in one run: their section of the config, optimizers, schedules and losses.

Each adapter trains as in a run of its own, which `single` describes. They share the base, the
passes over it and the sizes of batches.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.checkpoint.adapter_base import adapter_texts
from qfsdp.checkpoint.adapter_files import save_adapter, write_adapter
from qfsdp.checkpoint.compatibility import data_settings
from qfsdp.checkpoint.state import follow_schedule
from qfsdp.common.devices import sum_dtype
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.terminal import warn
from qfsdp.config.component import Component
from qfsdp.config.load import get_key
from qfsdp.data.joined import JoinedBatch, JoinedLoader
from qfsdp.data.loader import StepLoader
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import NAMES, AdapterConfig
from qfsdp.modules.adapters.linears import parameter_groups
from qfsdp.modules.adapters.several import BESIDE, AdapterRows, alone
from qfsdp.training.locate_nonfinite import Losses, Part
from qfsdp.training.optimizer import build_optimizer, build_scheduler
from qfsdp.training.steps import StepClock, are_finite, optim_step


@dataclass
class OneConfig(AdapterConfig):
    """An entry of `adapters`: the keys of a section `adapter`, and those of a run.

    Fields:
        lr: learning rate; null: `optimizer.lr`.
        dataset: its rows; null: the run's `dataset`.
        lr_scheduler: schedule of its learning rate; it spans this adapter's updates. null: the
            run's `lr_scheduler`.
        seed: decides the order of its samples and its first weights; null: the run's `seed`.
    """

    lr: float | None = None
    dataset: Component | None = None
    lr_scheduler: Component | None = None
    seed: int | None = None

    def check(self) -> None:
        super().check()
        needed = {"dropout": 0.0, "init": "default"}
        needed |= dict.fromkeys(("modules_to_save", "expert_rank", "expert_sharing"))
        needed |= {"trainable_token_indices": None}
        if not self.is_low_rank:
            raise InvalidField("method", self.method, "lora or dora beside other adapters")
        for key, expected in needed.items():
            if (value := getattr(self, key)) != expected:
                words = "null" if expected is None else str(expected)
                raise InvalidField(key, value, f"{words} beside other adapters")
        if self.lr is not None and not self.lr > 0:
            raise InvalidField("lr", self.lr, "a number above 0, or null")
        if self.seed is not None and self.seed < 0:
            raise InvalidField("seed", self.seed, "an integer of at least 0, or null")


def single(cfg: Any, name: str) -> Any:
    """The config of a run that trains the adapter `name` alone, with a section `adapter`."""
    one, own = copy.copy(cfg), cfg.adapters[name]
    one.adapter = own
    one.dataset = own.dataset or cfg.dataset
    one.lr_scheduler = own.lr_scheduler or cfg.lr_scheduler
    one.seed = cfg.seed if own.seed is None else own.seed
    if own.lr is not None:
        one.optimizer = replace(cfg.optimizer, kwargs=cfg.optimizer.kwargs | {"lr": own.lr})
    return one


def dataset_key(cfg: Any, name: str) -> str:
    """The place of an adapter's dataset in the config."""
    return "dataset" if cfg.adapters[name].dataset is None else f"adapters.{name}.dataset"


def in_words(cfg: Any, name: str, loader: StepLoader, steps: int) -> str:
    """A line about an adapter before its first step."""
    one = single(cfg, name)
    kind = f"{NAMES[one.adapter.method]}, rank {one.adapter.rank}"
    rate = f"learning rate {one.optimizer.kwargs.get('lr', 'of the optimizer')}"
    return f"adapter {name}: {kind}, {rate}, {len(loader.dataset):,} rows, {steps:,} steps"


def check_several(cfg: Any) -> None:
    """Checks what adapters that share a base cannot have, and sorts them by name.

    Raises:
        UserError: there is no adapter, a name cannot be that of a folder, an adapter has no
            dataset, or a setting does not go with several adapters.
    """
    if not cfg.adapters:
        raise UserError("adapters: {}; expected a section for each adapter, by its name")
    # Optimizer groups are restored by their place: a resumed run may name adapters in any order.
    cfg.adapters = dict(sorted(cfg.adapters.items()))
    lower = [name.lower() for name in cfg.adapters]
    for name, adapter in cfg.adapters.items():
        if not re.fullmatch(r"[\w-]+", name) or lower.count(name.lower()) > 1:
            expected = "different names of letters, digits, '_' and '-', as each is a folder"
            raise UserError(f"adapters: {name!r}; expected {expected}")
        dataset = adapter.dataset or cfg.dataset
        if dataset is None:
            raise UserError(f"adapters.{name}.dataset: null, as is dataset; expected one of them")
        if dataset.kwargs.get("streaming") is True:
            raise UserError(f"adapters.{name}.dataset.streaming: true; expected false")
    fits = {
        "model.dtype": (cfg.model.dtype != "fp16", "bf16 or fp32"),
        "compile": (not cfg.compile, "false"),
        "quantization.compute": (cfg.quantization.compute != "fp8", "bf16"),
        "validation.patience": (cfg.validation.patience is None, "null"),
        "sharding.context_parallel": (cfg.sharding.context_parallel == 1, "1"),
    }
    for key, (is_so, expected) in fits.items():
        if not is_so:
            raise InvalidField(key, get_key(cfg, key), f"{expected} with several adapters")
    if cfg.checkpoint.publish is not None:
        raise InvalidField("checkpoint.publish", cfg.checkpoint.publish, "null: it takes one")


# ---- optimizers ----------------------------------------------------------------------------------


class Optimizers(Optimizer):
    """The optimizers of all adapters as one, for checkpoints and reports. Each makes its own steps.

    Attributes:
        each: one of each adapter.
        apart: some have made the last step and others, with NaN or infinity, have not: such a state
            is that of no step.
    """

    apart = False

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self.each = list(each)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.each for group in one.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {param: fields for one in self.each for param, fields in one.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.each:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        groups, first = [], 0
        for one in self.each:
            own = one.state_dict()
            state |= {first + at: fields for at, fields in own["state"].items()}
            for group in own["param_groups"]:
                groups.append(group | {"params": [first + at for at in group["params"]]})
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, first = iter(state_dict["param_groups"]), 0
        for one in self.each:
            mine = [next(groups) for _ in one.param_groups]
            mine = [g | {"params": [at - first for at in g["params"]]} for g in mine]
            size = sum(len(group["params"]) for group in mine)
            places = range(first, first + size)
            state = {n - first: f for n, f in state_dict["state"].items() if n in places}
            one.load_state_dict({"state": state, "param_groups": mine})
            first += size


class Schedules(LRScheduler):
    """The schedules of all adapters as one, for checkpoints.

    Attributes:
        each: one of each adapter; None: its learning rate is constant.
    """

    def __init__(self, each: Sequence[LRScheduler | None]) -> None:
        self.each = list(each)

    def state_dict(self) -> dict[str, Any]:
        return {"each": [one and one.state_dict() for one in self.each]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for one, state in zip(self.each, state_dict["each"], strict=True):
            if one is not None:
                one.load_state_dict(state)
                follow_schedule(one)


def build_optimizers(
    cfg: Any, model: nn.Module, steps: Mapping[str, int]
) -> tuple[Optimizers, Schedules]:
    """The optimizer and the schedule of each adapter, as its own run has them.

    Args:
        steps: the updates of each, by name.
    """
    optimizers, schedules = [], []
    for name in cfg.adapters:
        one = single(cfg, name)
        groups = parameter_groups(alone(model, name), one.adapter)
        optimizers.append(build_optimizer(one.optimizer, groups))
        schedules.append(build_scheduler(one.lr_scheduler, optimizers[-1], steps[name]))
    return Optimizers(optimizers), Schedules(schedules)


# ---- a step --------------------------------------------------------------------------------------


def targets_of_each(batches: Sequence[JoinedBatch], world: World) -> Tensor:
    """fp32 `[adapters]` on the device: the target tokens of each adapter, of all ranks and
    micro-batches; at least 1."""
    counts = torch.tensor([batch.targets_of for batch in batches]).sum(0)
    counts = counts.to(world.device, sum_dtype(world.device))
    return world.sum_of(counts).float().clamp_(min=1)


def summed_losses(model: nn.Module, batch: JoinedBatch) -> Tensor:
    """fp32 `[adapters]`, with gradients: the cross entropy of the rows of each, summed over their
    target tokens."""
    cast(AdapterRows, model.adapter_rows).counts = batch.rows
    summed: Tensor = model(
        batch.tokens,
        batch.positions,
        labels=batch.labels,
        cu_seqlens=batch.cu_seqlens,
        sample_ids=batch.sample_ids,
        num_samples=len(batch.rows),
        num_targets=batch.num_targets,
    )
    return summed


def update_each(
    model: nn.Module,
    optimizer: Optimizer,
    schedules: LRScheduler | None,
    losses: Tensor,
    trained: Sequence[bool],
    clip: float | None,
    world: World,
    clock: StepClock,
) -> dict[str, float]:
    """`optim_step` of every adapter that has rows in this step: each with its own gradient norm,
    clipping, optimizer, schedule and decision about NaN.

    Args:
        optimizer: `Optimizers`. Any other, of a dry run, holds the parameters of all.
        losses: fp32 `[adapters]`, this rank's parts.
        trained: whether an adapter has rows.

    Returns:
        `NAME/loss`, `NAME/grad_norm` and `NAME/lr` of each, and of all together `loss`, their
        mean, `grad_norm`, the root of their squares' sum, and `lr`, the largest.
    """
    names = cast(AdapterRows, model.adapter_rows).names
    each = getattr(optimizer, "each", [optimizer] * len(names))
    plans = schedules.each if isinstance(schedules, Schedules) else [None] * len(names)
    found: dict[str, dict[str, float]] = {}
    for at, (name, own, plan) in enumerate(zip(names, each, plans, strict=True)):
        if not trained[at]:
            own.zero_grad()  # zeros, with which AdamW would go on
            continue
        found[name] = optim_step(
            alone(model, name), own, losses[at], world, clip=clip, scheduler=plan, clock=clock
        )
    bad = [name for name, of in found.items() if not are_finite(of)]
    if isinstance(optimizer, Optimizers):
        optimizer.apart = 0 < len(bad) < len(found)
    if bad and world.rank == 0:
        warn(f"adapters {', '.join(bad)}: a loss or gradient is not finite")
    of_all = {key: [of[key] for of in found.values()] for key in ("loss", "grad_norm", "lr")}
    metrics = {f"{name}/{key}": value for name, of in found.items() for key, value in of.items()}
    together = {
        "loss": sum(of_all["loss"]) / len(found),
        "grad_norm": math.hypot(*of_all["grad_norm"]),
    }
    return together | {"lr": max(of_all["lr"])} | metrics


def losses_to_look_at(model: nn.Module, batches: Sequence[JoinedBatch], world: World) -> Losses:
    """The losses of a micro-batch by adapter, for `NonFiniteWatch`."""
    targets, rows = targets_of_each(batches, world), cast(AdapterRows, model.adapter_rows)

    def of(batch: JoinedBatch) -> list[Part]:
        losses = (summed_losses(model, batch) / targets).unbind()
        return [Part(f"loss of {n}", one, one) for n, one in zip(rows.names, losses, strict=True)]

    return of


# ---- checkpoints ---------------------------------------------------------------------------------


def settings_of_each(loader: JoinedLoader) -> dict[str, Any]:
    """`data_settings` of every adapter."""
    return {
        f"{name}: {key}": value
        for name, one in loader.loaders.items()
        for key, value in data_settings(one).items()
    }


def texts_of_each(cfg: Any) -> dict[str, dict[str, str]]:
    """By adapter, the files that are written beside it (`adapter_texts`)."""
    found = {}
    for name in cfg.adapters:
        one = single(cfg, name)
        one.adapters = {}  # no text has them, and to write all of 300 takes seconds
        found[name] = adapter_texts(one)
    return found


def export_each(
    cfg: Any, files: Mapping[str, Mapping[str, str]]
) -> Callable[[dict[str, Tensor], Path], None]:
    """The `export` of a `Checkpointer`: writes `adapters/NAME/` of each in PEFT's format."""

    def export(tensors: dict[str, Tensor], folder: Path) -> None:
        for name, config in cfg.adapters.items():
            mark = f".{BESIDE}{name}."
            own = {key.replace(mark, "."): t for key, t in tensors.items() if mark in key}
            write_adapter(own, config, cfg.model.path, folder / "adapters" / name, files[name])

    return export


def saves_of_each(
    cfg: Any, model: nn.Module, world: World, files: Mapping[str, Mapping[str, str]]
) -> dict[str, Callable[[Path], None]]:
    """By adapter, a function that writes it to a folder in PEFT's format. Every rank calls it."""

    def save(name: str, folder: Path) -> None:
        given = (alone(model, name), cfg.adapters[name], cfg.model.path, folder)
        save_adapter(*given, world, files[name])

    return {name: partial(save, name) for name in cfg.adapters}
