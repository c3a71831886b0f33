"""Refuses a run that cannot fit before anything is loaded, and names changes that would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import le
from typing import Any

from qfsdp.common.devices import accelerator
from qfsdp.common.errors import UserError, speaks_for_all
from qfsdp.common.long_waits import long_wait
from qfsdp.common.sizes import format_size
from qfsdp.common.terminal import say
from qfsdp.launch.preflight_findings import note_estimates
from qfsdp.launch.ranks import planned_ranks
from qfsdp.planning.advice import SUGGESTIONS, options
from qfsdp.planning.changes import Changes, as_words, strategy_over_all_ranks
from qfsdp.planning.estimate import BuildModel, TrainStep
from qfsdp.planning.estimate import micro_batch_tokens as micro_batch_tokens
from qfsdp.planning.hardware import (
    Hardware,
    HardwareConfig,
    device_memory_of,
    known_gpu,
    machine_memory,
)
from qfsdp.planning.held_out import check_held_out
from qfsdp.planning.oom import Run as Run
from qfsdp.planning.oom import explain_out_of_memory as explain_out_of_memory
from qfsdp.planning.predict import (
    Prediction,
    Predictor,
    between,
    check_micro_batch,
    check_process_fits,
)
from qfsdp.planning.teacher_pass import check_teacher_pass

MOST_TRIED = 8  # dry runs of choices, besides those of single options
PER_OPTION = 1.05  # factor on the time, see `_likely`
FAR, FREE = 2.0, 1.02  # factors on the memory and on the time, see `_smaller_batch`

Choice = tuple[int, ...]  # of every group: 0, or 1 + the index of an option


def check_memory(cfg: Any, build_model: BuildModel, train_step: TrainStep) -> None:
    """Compares the memory that a training step needs with the available memory.

    A dry run finds what the step needs, for the number of ranks that will start
    (`qfsdp.launch.ranks.planned_ranks`). Available are `cfg.device_memory`, else the memory of this
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
    if target == "cuda":
        check_process_fits(hardware)
    check_micro_batch(cfg, hardware.device_memory)
    predict = Predictor(build_model, train_step, cfg, world_size, local, hardware, target)
    try:
        now = predict({})
        if now.fits(hardware):
            check_held_out(predict)
            check_teacher_pass(predict)
    except UserError:
        raise
    except Exception as error:  # for example, a user's optimizer that fails on fake tensors
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        say(f"memory: not estimated, training starts without a check ({what})")
        return
    if not now.fits(hardware):
        with long_wait("memory: too little; searching for changes that fit"):
            raise UserError(refusal(predict, now))
    needs, available = format_size(now.device_bytes), format_size(hardware.device_memory)
    note_estimates(f"about {needs} of {available} per rank", _seconds(now))
    if speaks_for_all():
        print(f"memory: about {needs} of {available} per rank (preflight)", flush=True)


def _seconds(prediction: Prediction) -> float | None:
    """The time of a step; None if this machine's GPU is not in the table of known ones."""
    import torch

    try:
        known_gpu(torch.cuda.get_device_name())
    except (UserError, RuntimeError, AssertionError):  # without a GPU, or built without CUDA
        return None
    return prediction.time.seconds


def this_machine(cfg: Any, ranks: int) -> tuple[Hardware, str]:
    """The hardware that `ranks` ranks of this machine have, and the target, "cuda" or "cpu". Raises
    UserError: `cfg.device_memory` is not a size."""
    import torch

    given = device_memory_of(cfg)
    if accelerator() is not None:
        module = torch.get_device_module()
        cards = [module.get_device_properties(at) for at in range(module.device_count())]
        smallest = min(cards, key=lambda card: card.total_memory)
        size = given or smallest.total_memory
        try:
            hardware = HardwareConfig(gpu=smallest.name, device_memory=size).build()
        except UserError:  # a GPU that is not in the table
            hardware = HardwareConfig(device_memory=size).build()
    elif given is not None:
        hardware = HardwareConfig(device_memory=given).build()
    else:
        return HardwareConfig(device_memory=machine_memory() // ranks).build(), "cpu"
    return replace(hardware, host_memory=machine_memory()), "cuda"


# ---- the message ---------------------------------------------------------------------------


def refusal(predict: Predictor, now: Prediction) -> str:
    """One line: the needed and the available memory, and the fastest changes that would fit."""
    hardware = predict.hardware
    if now.fits_device(hardware):
        needs = f"{format_size(now.host_bytes)} of host memory per machine"
        available = format_size(hardware.host_memory or 0)
    else:
        kind, size = max(now.kinds.items(), key=lambda entry: entry[1])
        largest = f"{kind.replace('_', ' ')}: {format_size(size)}"
        needs = f"{format_size(now.device_bytes)} per rank ({largest})"
        available = format_size(hardware.device_memory)
    found, least = suggest(predict, now)
    if found:
        ways = (f"{as_words(p.changes)} ({_cost(p, now)})" for p in found)
        advice = f"it would fit with {'; or with '.join(ways)}"
    else:
        advice = _without_fit(predict, least)
    return f"memory: a step needs {needs}; available: {available}; {advice}"


def _cost(prediction: Prediction, now: Prediction) -> str:
    slower = prediction.time.seconds / now.time.seconds
    return f"{format_size(prediction.device_bytes)}, about {slower:.2f} times the time"


def _without_fit(predict: Predictor, least: Prediction) -> str:
    """What hardware the config would need, if no change of the config is enough."""
    needs = f"GPUs of {format_size(least.device_bytes)}"
    if least.fits_device(predict.hardware):
        needs = f"{format_size(least.host_bytes)} of host memory"
    changes = least.changes | strategy_over_all_ranks("full_shard")
    for doubled in range(1, 4):
        ranks = predict.world_size * 2**doubled
        if predict.on(ranks)(changes).fits(predict.hardware):
            needs += f", or {ranks} ranks"
            break
    smallest = as_words(least.changes) or "another config"
    return f"not even {smallest} would fit; it needs {needs}"


# ---- what would fit ------------------------------------------------------------------------


def option_groups(predict: Predictor) -> list[list[Changes]]:
    """The options of `qfsdp.planning.advice` that leave the training as it is, one group per
    aspect.

    A choice takes at most one option of each group. The cheapest of a group comes first.
    """
    groups: dict[str, list[Changes]] = {}
    for option in options(predict.cfg, predict.world_size, on_gpu=predict.target != "cpu"):
        if option.same_numbers:
            groups.setdefault(option.aspect, []).append(option.changes)
    return list(groups.values())


def suggest(predict: Predictor, now: Prediction) -> tuple[list[Prediction], Prediction]:
    """Up to three changes that fit, the fastest first, and the prediction that takes the least.

    Single options are predicted. Choices of several are guessed from these; those that should fit
    are predicted, in the order of their guessed time. A choice that goes further than one that fits
    in every group is suggested only if nothing else is left. A choice that only adds changes to one
    that fits is never suggested. If a smaller micro-batch is advice enough, nothing else is tried.
    """
    groups = option_groups(predict)
    if (smaller := _smaller_batch(predict, now, groups)) is not None:
        return [smaller], smaller
    singles = [_predict_group(predict, now, group) for group in groups]
    last = tuple(map(len, groups))  # probably takes the least of all
    choices = [*_likely(now, singles, predict.hardware), last]
    fitting: dict[Choice, Prediction] = {}
    tried, most = [now], predict.count + MOST_TRIED

    def goes_further(choice: Choice, other: Choice) -> bool:
        return all(map(le, other, choice))

    def only_adds(choice: Choice, other: Choice) -> bool:
        return _changes(groups, other).items() <= _changes(groups, choice).items()

    for is_spare in (goes_further, only_adds):
        for choice in choices:
            if len(fitting) == SUGGESTIONS or predict.count >= most:
                break
            if any(is_spare(choice, other) for other in fitting):
                continue
            if (real := _attempt(predict, _changes(groups, choice))) is not None:
                tried.append(real)
                if real.fits(predict.hardware):
                    fitting[choice] = real
    tried += [p for group in singles for p in group if p is not None]
    ranked = sorted(fitting.values(), key=lambda p: p.time.seconds)
    return ranked, min(tried, key=lambda p: p.device_bytes)


def _smaller_batch(
    predict: Predictor, now: Prediction, groups: Sequence[Sequence[Changes]]
) -> Prediction | None:
    """The largest micro-batch that fits, if the given one needs over `FAR` times the memory, and
    the smaller one at most `FREE` times its time.

    Other changes need dry runs of so large a batch: for 100,000 rows all took 9.9 s, these 3.7.
    """
    batches = next((group for group in groups if "batch_size" in group[0]), None)
    if batches is None or now.device_bytes <= FAR * predict.hardware.device_memory:
        return None
    guessed = zip(batches, _predict_group(predict, now, batches), strict=True)
    fitting = (size for size, guess in guessed if guess and guess.fits(predict.hardware))
    real = _attempt(predict, next(fitting, {}))
    if real and real.fits(predict.hardware) and real.time.seconds <= FREE * now.time.seconds:
        return real
    return None


def _changes(groups: Sequence[Sequence[Changes]], choice: Choice) -> Changes:
    chosen = (group[at - 1] for group, at in zip(groups, choice, strict=True) if at)
    return {key: value for option in chosen for key, value in option.items()}


def _attempt(predict: Predictor, changes: Changes) -> Prediction | None:
    """The prediction; None if the config refuses the changes."""
    with suppress(UserError):
        return predict(changes)
    return None


def _predict_group(
    predict: Predictor, now: Prediction, group: Sequence[Changes]
) -> list[Prediction | None]:
    """The predictions of all options of a group.

    Of micro-batches only the smallest is run dry: the others lie on a line between it and `now`.
    """
    least = _attempt(predict, group[-1])
    if "batch_size" not in group[0] or least is None:
        return [*(_attempt(predict, changes) for changes in group[:-1]), least]
    size = predict.cfg.batch_size
    shares = ((size - changes["batch_size"]) / (size - 1) for changes in group)
    return [between(now, least, share) for share in shares]


def _likely(
    now: Prediction, singles: Sequence[Sequence[Prediction | None]], hardware: Hardware
) -> list[Choice]:
    """The choices that should fit, in the order of their guessed time.

    Each further option counts as `PER_OPTION` of the time, as fewer changes are easier to follow.
    """
    fitting: list[tuple[float, Choice]] = []
    for choice in product(*(range(len(group) + 1) for group in singles)):
        chosen = [group[at - 1] for group, at in zip(singles, choice, strict=True) if at]
        known = [single for single in chosen if single is not None]
        if len(known) == len(chosen) and _together(now, known).fits(hardware):
            ratios = (PER_OPTION * p.time.seconds / now.time.seconds for p in known)
            fitting.append((math.prod(ratios), choice))
    return [choice for _, choice in sorted(fitting)]


def _together(now: Prediction, singles: Sequence[Prediction]) -> Prediction:
    """Guesses several changes at once from the prediction of each.

    Every change leaves a share of each kind of tensors, and the shares multiply: half the batch of
    half the activations are a quarter of the activations.
    """
    kinds = {}
    for kind in {kind for p in (now, *singles) for kind in p.kinds}:
        parts = [p.kinds.get(kind, 0) for p in singles]
        before = now.kinds.get(kind, 0)
        shares = [part / before for part in parts] if before else []
        kinds[kind] = int(before * math.prod(shares)) if before else max(parts, default=0)
    device = now.device_bytes + sum(kinds.values()) - sum(now.kinds.values())
    host = now.host_bytes + sum(p.host_bytes - now.host_bytes for p in singles)
    return replace(now, kinds=kinds, device_bytes=device, host_bytes=host)
