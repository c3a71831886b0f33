"""Whether an evaluation fits beside training: `validation.batch_size` may be larger than that of
training, and the run would end at the first evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from qfsdp.config.load import get_key
from qfsdp.distributed.world import World
from qfsdp.evaluation.heldout_loss import summed_loss
from qfsdp.evaluation.inference_model import evaluating
from qfsdp.modules.adapters.several import AdapterRows
from qfsdp.modules.score_head import score_head
from qfsdp.planning.estimate import adapters_of
from qfsdp.planning.predict import Predictor, check_fits
from qfsdp.training.scores import last_scores
from qfsdp.training.steps import StepClock


def check_held_out(predict: Predictor) -> None:
    """Raises UserError: the training step of `predict` fits, and a held-out batch does not. Those
    that are no larger than the micro-batches of training are not looked at."""
    cfg = predict.cfg
    size = get_key(cfg, "validation.batch_size")
    together = adapters_of(cfg)  # they train together, and are evaluated one by one
    if size is None or not cfg.validation.sets or size <= cfg.batch_size * together:
        return
    alone = {"global_batch_size": None, "optimizer_in_backward": False}
    larger = {"batch_size": -(-size // together), "gradient_accumulation_steps": 1}
    larger |= {key: value for key, value in alone.items() if hasattr(cfg, key)}
    found = replace(predict, cfg=replace(cfg, **larger), train_step=held_out_step)({})
    given = f"validation.batch_size: {size}"
    expected = f"a smaller one, or null: that of training, {cfg.batch_size}"
    check_fits(found, predict.hardware, given, "an evaluation", expected)


def held_out_step(
    model: nn.Module,
    _optimizer: Optimizer,
    _scheduler: None,
    batches: list[Any],
    _clip: float | None,
    _world: World,
    clock: StepClock,
    **_: Any,
) -> dict[str, float]:
    """What an evaluation does with its batches, in place of a recipe's `train_step`."""
    if (rows := cast(AdapterRows | None, getattr(model, "adapter_rows", None))) is not None:
        rows.counts = [int(name == rows.names[0]) for name in rows.names]  # all are the first's
    with clock.phase("validation"), evaluating(model):
        for batch in batches:
            (summed_loss if score_head(model) is None else last_scores)(model, batch)
    return {}
