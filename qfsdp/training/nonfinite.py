"""NaN and infinity in training: an update that has them is not applied, and the run stops or skips.

The loss and the gradient norm of all ranks decide whether the optimizer runs, so all ranks decide
alike and the weights are still those of the step before. `NonFiniteWatch` says where
the numbers come from (`qfsdp.training.locate_nonfinite`), saves the state, and ends the run, or
lets it go on with the next step (`on_nonfinite`). A gradient of fp16 that overflows is no such case
as long as a smaller loss scale may help (`qfsdp.training.loss_scale`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from qfsdp.checkpoint.resume import Checkpointer, TrainState
from qfsdp.checkpoint.state import random_state, set_random_state
from qfsdp.common.errors import UserError
from qfsdp.common.terminal import warn
from qfsdp.data.batch import Batch
from qfsdp.distributed.world import World
from qfsdp.training.locate_nonfinite import StepParts, locate_nonfinite
from qfsdp.training.loss_scale import (
    LEAST,
    has_loss_scale,
    loss_scale,
    skipped_by_overflow,
    update_loss_scale,
)
from qfsdp.training.loss_scale import start_loss_scale as start_loss_scale
from qfsdp.training.steps import DECIDE, are_finite, start_reading
from qfsdp.training.steps_in_backward import StepsInBackward

OnNonFinite = Literal["stop", "skip"]
"""What a run does after an update with NaN or infinity, which is never applied: end with an error,
or leave it out (at most `MAX_SKIPPED` in a row)."""

# One bad sample costs one update of an epoch. Weights that have diverged fail in every update.
MAX_SKIPPED = 5


def step_metrics(
    loss: Tensor, grad_norm: Tensor, optimizer: Optimizer, world: World
) -> dict[str, float]:
    """The loss of all ranks, the gradient norm and the learning rate of an update, read before
    `optimizer.step()`: for recipes that were copied before `optim_step` did this."""
    lr = float(optimizer.param_groups[0]["lr"])
    return start_reading(world.sum_of(loss.detach().double()), grad_norm, lr)()


class NonFiniteWatch:
    """Looks at the metrics of every update, and acts on those that are not finite.

    Every rank makes one after a checkpoint is loaded, and calls `after` after every `train_step`.

    Args:
        then: what to do.
        state: of the run.
        checkpoints: save the state when the run stops.
        parts: compute the losses of a step again; None: cross entropy.
    """

    def __init__(
        self,
        then: OnNonFinite,
        state: TrainState,
        checkpoints: Checkpointer,
        world: World,
        parts: StepParts | None = None,
    ) -> None:
        self._then, self._state, self._checkpoints = then, state, checkpoints
        self._world, self._parts = world, parts
        self._skipped = self._in_a_row = 0
        self._random = random_state(world.device)  # as the next step begins

    def after(
        self, step: int, batches: Sequence[Batch], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Returns the metrics, with `skipped_steps`, their number so far, if there are any, and
        with the loss scale of fp16, which it updates.

        Args:
            batches: this rank's micro-batches of the step.
            metrics: of `optim_step`.

        Raises:
            UserError: they are not finite, and the run is to stop.
        """
        optimizer = self._state.optimizer
        scale = loss_scale(optimizer)
        overflow = math.isfinite(metrics["loss"]) and not math.isfinite(metrics["grad_norm"])
        if are_finite(metrics):
            self._in_a_row = 0
            update_loss_scale(optimizer, overflow=False)
        elif overflow and scale > LEAST:  # of fp16; a smaller scale may help
            update_loss_scale(optimizer, overflow=True)
        else:
            self._act(step, batches, metrics)
        self._random = random_state(self._world.device)
        skipped = self._skipped + skipped_by_overflow(optimizer)
        scaled = {"loss_scale": scale} if has_loss_scale(optimizer) else {}
        return metrics | scaled | ({"skipped_steps": skipped} if skipped else {})

    def _act(self, step: int, batches: Sequence[Batch], metrics: dict[str, float]) -> None:
        wrong = [f"{name} {metrics[name]}" for name in DECIDE if not math.isfinite(metrics[name])]
        numbers = ", ".join(wrong)
        if has_loss_scale(self._state.optimizer):
            numbers += f" at loss scale {loss_scale(self._state.optimizer):g}"
        now = random_state(self._world.device)
        set_random_state(self._random, self._world.device)
        model, optimizer = self._state.model, self._state.optimizer
        found = locate_nonfinite(model, optimizer, batches, self._world, self._parts)
        first = f"first not finite: {found}" if found else "a second look found finite numbers only"
        text = f"step {step}: {numbers}; {first}"
        if self._then == "stop" or self._in_a_row == MAX_SKIPPED:
            after = f" after {MAX_SKIPPED} skipped updates" if self._in_a_row else ""
            raise UserError(f"{text}; stopped{after}: {self._save(step)}; {self._expected()}")
        self._skipped, self._in_a_row = self._skipped + 1, self._in_a_row + 1
        if self._world.rank == 0:
            warn(f"{text}; the update is skipped")
        set_random_state(now, self._world.device)

    def _expected(self) -> str:
        """What the user may do. A resumed run must have its checkpoint's optimizer and dataset."""
        expected = "expected another optimizer.lr or dataset in a new run"
        if has_loss_scale(self._state.optimizer):
            expected = f"fp16 holds numbers up to 65,504; {expected}, or model.dtype=fp32"
        if self._then == "skip" or isinstance(self._state.optimizer, StepsInBackward):
            return expected
        resume = "resume=auto with " if self._checkpoints.saved_step else ""
        return f"{expected}, or {resume}on_nonfinite=skip"

    def _save(self, step: int) -> str:
        """Saves the state of the step before, unless it is saved or damaged. Returns words for the
        last step that is saved."""
        before, checkpoints = step - 1, self._checkpoints
        optimizer = self._state.optimizer
        damaged = isinstance(optimizer, StepsInBackward) and bool(optimizer.grad_norms)
        damaged = damaged or getattr(optimizer, "apart", False)  # of several adapters
        try:
            if before > checkpoints.saved_step and not damaged:
                set_random_state(self._random, self._world.device)
                checkpoints.save(before, self._state)
            checkpoints.close()
        except UserError as error:
            return str(error)
        if checkpoints.saved_step == 0:
            return "there is no checkpoint yet"
        return f"step {checkpoints.saved_step} is saved"
