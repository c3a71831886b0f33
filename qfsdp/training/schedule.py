"""Learning rate schedules that configs name."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int
) -> LambdaLR:
    """A linear warm-up, then a half cosine from the full learning rate towards 0.

    Step n of the warm-up has n / `num_warmup_steps` of the full rate. torchtune's
    `get_cosine_schedule_with_warmup` has (n - 1) / `num_warmup_steps`: its first step changes
    nothing. After the warm-up both are equal.

    Args:
        num_warmup_steps: 0: no warm-up.
        num_training_steps: of the whole run; the recipe passes it.
    """

    def share(steps_before: int) -> float:
        if steps_before < num_warmup_steps:
            return (steps_before + 1) / num_warmup_steps
        progress = (steps_before - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    return LambdaLR(optimizer, share)
