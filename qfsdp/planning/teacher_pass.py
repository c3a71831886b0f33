"""Whether the teacher's own pass fits: with `teacher.logprobs: cache` it writes its most likely
tokens before the student is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from qfsdp.config.load import get_key
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import build_frozen, evaluating
from qfsdp.modules.distillation import DistillationConfig
from qfsdp.planning.estimate import estimate
from qfsdp.planning.predict import Predictor, check_fits
from qfsdp.training.distillation import Teacher, of_teacher
from qfsdp.training.steps import StepClock
from qfsdp.training.teacher_cache import FACTS, folder_of, shared_tokens


def check_teacher_pass(predict: Predictor) -> None:
    """Raises UserError: the training step of `predict` fits, and the teacher's pass before it does
    not. Nothing is checked if the folder has some of its words already: the teacher may have run on
    another machine."""
    cfg = predict.cfg
    if get_key(cfg, "teacher.logprobs") in (None, "live") or (folder_of(cfg) / FACTS).exists():
        return
    step = partial(teacher_step, config=cfg.distillation, tokens=shared_tokens(cfg))
    # An adapter's folder names linears of all layers, so no dry run can have fewer.
    how = predict.estimate if cfg.teacher.adapter is None else estimate
    given = replace(predict, cfg=alone(cfg), build_model=build_teacher, train_step=step)
    found = replace(given, estimate=how)({})
    key = f"teacher.logprobs: {cfg.teacher.logprobs}"
    expected = (
        "a smaller batch_size, more quantization of the teacher, or a folder that a larger machine "
        "has written"
    )
    check_fits(found, predict.hardware, key, "the teacher's own pass", expected)


def alone(cfg: Any) -> Any:
    """The config of the pass: the teacher in the student's place, one micro-batch at a time."""
    once = {"model": cfg.teacher.model, "sharding": of_teacher(cfg), "compile": False}
    return replace(cfg, **once, gradient_accumulation_steps=1, global_batch_size=None)


def build_teacher(cfg: Any, weights: Any) -> Any:
    """The teacher of the config `alone`, in place of a recipe's `build_model`."""
    given = cfg.teacher
    model: Any = build_frozen(cfg.model, given.quantization, given.adapter, weights).eval()
    model.body.norm.requires_grad_(True)  # a dry run has an optimizer, which refuses no parameters
    return model


def teacher_step(
    model: nn.Module,
    _optimizer: Optimizer,
    _scheduler: None,
    batches: list[Any],
    _clip: float | None,
    world: World,
    clock: StepClock,
    *,
    config: DistillationConfig,
    tokens: int,
    **_: Any,
) -> dict[str, float]:
    """What the pass does with micro-batches, in place of a recipe's `train_step`.

    Args:
        tokens: as of `Teacher`.
    """
    teacher = Teacher(model, config, world, tokens)
    with clock.phase("teacher"), evaluating(model):
        for batch in batches:
            teacher.most_likely(config.top_k or 1, batch)
    return {}
