"""fp16: gradients are computed times a loss scale, or the small ones would become 0.

fp16 holds numbers from 6e-8 to 65,504. `backward` multiplies the loss by the scale, and
`clip_grad_norm` divides the gradients, which are added up in fp32. If one overflows on some rank,
the gradient norm of all ranks is not finite: so all leave the update out, without another
all-reduce or another wait for the device. Then the scale is halved. After `GROWTH_INTERVAL` updates
without overflow it is doubled.

These are the rules of `torch.amp.GradScaler`, whose own step would wait for the device once more,
and reduce over ranks once per dtype. The scale is kept in the first group of the optimizer, as
schedules keep `initial_lr`: so checkpoints have it. It is a power of 2: it changes no digit.
"""

from __future__ import annotations

from torch.optim import Optimizer

from qfsdp.training.steps import LOSS_SCALE as SCALE
from qfsdp.training.steps import loss_scale as loss_scale

INITIAL, LEAST = 2.0**16, 1.0
GROWTH_INTERVAL = 2000  # updates
SINCE, SKIPPED = "updates_since_overflow", "skipped_steps"


def start_loss_scale(optimizer: Optimizer, model_dtype: str) -> None:
    """Gives a new optimizer a loss scale if `model.dtype` is "fp16"; else does nothing."""
    if model_dtype == "fp16":
        optimizer.param_groups[0].update({SCALE: INITIAL, SINCE: 0, SKIPPED: 0})


def has_loss_scale(optimizer: Optimizer) -> bool:
    """Whether the model computes in fp16."""
    return SCALE in optimizer.param_groups[0]


def update_loss_scale(optimizer: Optimizer, overflow: bool) -> None:
    """Sets the scale of the next step, if there is a scale. Every rank must call it alike.

    Args:
        overflow: whether a gradient of this step was not finite on some rank, and the update was
            left out.
    """
    if not has_loss_scale(optimizer):
        return
    group = optimizer.param_groups[0]
    group[SINCE] = 0 if overflow else group[SINCE] + 1
    if overflow:
        group[SCALE] = max(group[SCALE] / 2, LEAST)
        group[SKIPPED] += 1
    elif group[SINCE] == GROWTH_INTERVAL:
        group[SCALE], group[SINCE] = 2 * group[SCALE], 0


def skipped_by_overflow(optimizer: Optimizer) -> int:
    """How many updates of the run were left out, because a gradient overflowed."""
    return int(optimizer.param_groups[0].get(SKIPPED, 0))
