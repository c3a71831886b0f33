"""A run that cannot fit is refused before anything is loaded, with what would make it fit."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import le
from typing import Any

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.cli.errors import UserError
from qfsdp.cli.ranks import planned_ranks
from qfsdp.cli.sizes import format_size
from qfsdp.memory.estimate import BuildModel, TrainStep
from qfsdp.memory.hardware import Hardware, HardwareConfig, machine_memory, told_device_memory
from qfsdp.memory.predict import Changes, Prediction, Predictor, as_words, between
from qfsdp.memory.search import CHECKPOINTING, STORES, batch_of, spread

SUGGESTIONS = 3
MOST_TRIED = 8  # dry runs for them, beside those of single changes
PER_OPTION = 1.05  # times the time, see `_likely`

Choice = tuple[int, ...]


def check_memory(cfg: Any, build_model: BuildModel, train_step: TrainStep) -> None:
    """Compares the memory that a training step needs with the memory that is there.

    A dry run finds what the step needs, for the number of ranks that will start
    (`qfsdp.cli.ranks.planned_ranks`). What is there: `cfg.device_memory`, else the memory of this
    machine's GPUs, else a rank's share of its host memory. Prints one line. Does nothing if
    `cfg.preflight` is false.

    Args:
        cfg: the recipe's config.
        build_model, train_step: the recipe's functions.

    Raises:
        UserError: the step does not fit; the message names the cheapest changes with which it does.
    """
    if not cfg.preflight:
        return
    world_size, local = planned_ranks()
    hardware, target = this_machine(cfg, local)
    predict = Predictor(build_model, train_step, cfg, world_size, local, hardware, target)
    try:
        now = predict({})
    except UserError:
        raise
    except Exception as error:  # a user's own optimizer, say, that fake tensors do not get through
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"memory: not estimated, going on without it ({what})", file=sys.stderr, flush=True)
        return
    if not now.fits(hardware):
        print("memory: too little; looking for what would fit", file=sys.stderr, flush=True)
        raise UserError(refusal(predict, now))
    if os.environ.get("RANK", "0") == "0":
        needs, there = format_size(now.device_bytes), format_size(hardware.device_memory)
        print(f"memory: about {needs} of {there} per rank (preflight)", flush=True)


def this_machine(cfg: Any, ranks: int) -> tuple[Hardware, str]:
    """What `ranks` ranks of this machine have, and whether that is "cuda" or "cpu".

    Raises:
        UserError: `cfg.device_memory` is no size.
    """
    import torch

    told = told_device_memory(cfg)
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        cards = [module.get_device_properties(at) for at in range(module.device_count())]
        smallest = min(cards, key=lambda card: card.total_memory)
        size = told or smallest.total_memory
        try:
            hardware = HardwareConfig(gpu=smallest.name, device_memory=size).build()
        except UserError:  # a card that is not in the table
            hardware = HardwareConfig(device_memory=size).build()
    elif told is not None:
        hardware = HardwareConfig(device_memory=told).build()
    else:
        return HardwareConfig(device_memory=machine_memory() // ranks).build(), "cpu"
    return replace(hardware, host_memory=machine_memory()), "cuda"


# ---- what to say ---------------------------------------------------------------------------


def refusal(predict: Predictor, now: Prediction) -> str:
    """One sentence: what is needed of what there is, and the fastest changes that would fit."""
    hardware = predict.hardware
    if now.fits_device(hardware):
        needs = f"{format_size(now.host_bytes)} of host memory on a machine"
        there = format_size(hardware.host_memory or 0)
    else:
        needs = f"{format_size(now.device_bytes)} per rank, of which {_largest(now)},"
        there = format_size(hardware.device_memory)
    found, least = suggest(predict, now)
    if found:
        ways = (f"{as_words(p.changes)} ({_cost(p, now)})" for p in found)
        advice = f"it would fit with {'; or with '.join(ways)}"
    else:
        advice = _without_fit(predict, least)
    return f"memory: a step needs {needs} and there are {there}; {advice}"


def _largest(prediction: Prediction) -> str:
    kind = max(prediction.kinds, key=lambda kind: prediction.kinds[kind])
    return f"{kind} {format_size(prediction.kinds[kind])}"


def _cost(prediction: Prediction, now: Prediction) -> str:
    slower = prediction.time.seconds / now.time.seconds
    return f"{format_size(prediction.device_bytes)}, about {slower:.2f} times the time"


def _without_fit(predict: Predictor, least: Prediction) -> str:
    """What would have to be there, where no change of the config is enough."""
    needs = f"GPUs of {format_size(least.device_bytes)}"
    if least.fits_device(predict.hardware):
        needs = f"{format_size(least.host_bytes)} of host memory"
    changes = least.changes | spread("full_shard")
    for doubled in range(1, 4):
        ranks = predict.world_size * 2**doubled
        if predict.on(ranks)(changes).fits(predict.hardware):
            needs += f", or {ranks} ranks"
            break
    return f"not even {as_words(least.changes) or 'another config'} would fit: it takes {needs}"


# ---- what would fit ------------------------------------------------------------------------


def options(predict: Predictor) -> list[list[Changes]]:
    """Changes that take less memory, in groups of which one can be chosen, the fastest first."""
    cfg = predict.cfg
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    halves = (cfg.batch_size >> times for times in range(1, cfg.batch_size.bit_length()))
    groups = [
        [batch_of(size, rows) for size in halves if rows % size == 0],
        _after(cfg.activation.checkpointing, CHECKPOINTING, "activation.checkpointing"),
    ]
    if predict.world_size > 1:
        # shard_grad_op takes no less than ddp: see `qfsdp.memory.search`.
        groups.append([spread("full_shard")] * (cfg.sharding.strategy != "full_shard"))
        groups.append(_after(cfg.sharding.wrap, ("decoder_layer", "linear"), "sharding.wrap"))
    if predict.target != "cpu":
        needed = spread("full_shard") if cfg.sharding.strategy == "ddp" else {}
        names = ["cpu", "cpu_offload"] + ["disk"] * _is_packed(cfg.model.path)
        now = "cpu_offload" if cfg.sharding.cpu_offload else cfg.sharding.offload_base
        later = names[names.index(now) + 1 :] if now in names else names
        groups.append([STORES[name] | needed for name in later])
        groups.append(_after(cfg.activation.offload, (False, True), "activation.offload"))
    return [group for group in groups if group]


def _after(now: Any, order: tuple[Any, ...], key: str) -> list[Changes]:
    """The values after `now`; all but the first where `now` is none of them."""
    at = order.index(now) if now in order else 0
    return [{key: value} for value in order[at + 1 :]]


def _is_packed(folder: str) -> bool:
    try:
        return bool(ModelWeights(folder).quantized)
    except UserError:
        return False


def suggest(predict: Predictor, now: Prediction) -> tuple[list[Prediction], Prediction]:
    """Up to three changes that fit, the fastest first, and the prediction that takes least.

    A choice is an option of every group, or none of it (0). Single options are predicted; other
    choices are guessed from these, and predicted in the order of the time that they should take,
    as far as they should fit. What goes further than another one that fits is told only where
    there is nothing else; what merely adds to it, never.
    """
    groups = options(predict)
    singles = [_of_group(predict, now, group) for group in groups]
    last = tuple(map(len, groups))  # takes least of all, probably
    choices = [*_likely(now, singles, predict.hardware), last]
    found: dict[Choice, Prediction] = {}
    tried, most = [now], predict.count + MOST_TRIED

    def goes_further(choice: Choice, other: Choice) -> bool:
        return all(map(le, other, choice))

    def only_adds(choice: Choice, other: Choice) -> bool:
        return _changes(groups, other).items() <= _changes(groups, choice).items()

    for is_spare in (goes_further, only_adds):
        for choice in choices:
            if len(found) == SUGGESTIONS or predict.count >= most:
                break
            if any(is_spare(choice, other) for other in found):
                continue
            if (real := _attempt(predict, _changes(groups, choice))) is not None:
                tried.append(real)
                if real.fits(predict.hardware):
                    found[choice] = real
    tried += [p for group in singles for p in group if p is not None]
    ranked = sorted(found.values(), key=lambda p: p.time.seconds)
    return ranked, min(tried, key=lambda p: p.device_bytes)


def _changes(groups: Sequence[Sequence[Changes]], choice: Choice) -> Changes:
    chosen = (group[at - 1] for group, at in zip(groups, choice, strict=True) if at)
    return {key: value for option in chosen for key, value in option.items()}


def _attempt(predict: Predictor, changes: Changes) -> Prediction | None:
    """None where the config refuses it."""
    with suppress(UserError):
        return predict(changes)
    return None


def _of_group(
    predict: Predictor, now: Prediction, group: Sequence[Changes]
) -> list[Prediction | None]:
    """A prediction of every option; of micro-batches only the smallest is asked for, as those
    between lie on a line."""
    least = _attempt(predict, group[-1])
    if "batch_size" not in group[0] or least is None:
        return [*(_attempt(predict, changes) for changes in group[:-1]), least]
    size = predict.cfg.batch_size
    shares = ((size - changes["batch_size"]) / (size - 1) for changes in group)
    return [between(now, least, share) for share in shares]


def _likely(
    now: Prediction, singles: Sequence[Sequence[Prediction | None]], hardware: Hardware
) -> list[Choice]:
    """All choices that should fit, those first that should be fastest, where another option counts
    for as much as `PER_OPTION` of the time: fewer changes are easier to follow."""
    fitting: list[tuple[float, Choice]] = []
    for choice in product(*(range(len(group) + 1) for group in singles)):
        chosen = [group[at - 1] for group, at in zip(singles, choice, strict=True) if at]
        known = [single for single in chosen if single is not None]
        if len(known) == len(chosen) and _together(now, known).fits(hardware):
            ratios = (PER_OPTION * p.time.seconds / now.time.seconds for p in known)
            fitting.append((math.prod(ratios), choice))
    return [choice for _, choice in sorted(fitting)]


def _together(now: Prediction, singles: Sequence[Prediction]) -> Prediction:
    """A guess of several changes at once, from each of them: of every kind of tensor each leaves
    its share, as half the batch of half the activations are a quarter of them."""
    kinds = {}
    for kind in {kind for p in (now, *singles) for kind in p.kinds}:
        parts = [p.kinds.get(kind, 0) for p in singles]
        before = now.kinds.get(kind, 0)
        shares = [part / before for part in parts] if before else []
        kinds[kind] = int(before * math.prod(shares)) if before else max(parts, default=0)
    device = now.device_bytes + sum(kinds.values()) - sum(now.kinds.values())
    host = now.host_bytes + sum(p.host_bytes - now.host_bytes for p in singles)
    return replace(now, kinds=kinds, device_bytes=device, host_bytes=host)
