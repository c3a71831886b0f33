"""One update on one screen, for recipes and for training loops of your own.

    loss = forward_backward(loss_of, batches, optimizer, world)
    metrics = optim_step(model, optimizer, loss, world, clip=1.0)

The first adds up gradients, the second uses them. Between them they do what fails silently if it
is left out: the loss scale of fp16, the gradient norm over all ranks, no update from NaN, DoRA's
norms. What a batch's loss is stands in the recipe.

`save` writes the adapters in PEFT's format (`save_adapter`). `sample` (`qfsdp.training.rollouts`)
draws answers from the model that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.checkpoint.adapter_files import save_adapter as save
from qfsdp.data.batch import Batch
from qfsdp.distributed.gradients import clip_grad_norm, reduce_gradients, trainable_parameters
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.low_rank_linear import refresh_dora_norms
from qfsdp.training.cuda_graphs import StepGraphs
from qfsdp.training.finite_steps import are_finite, step_if_finite
from qfsdp.training.loss_scale import loss_scale
from qfsdp.training.step_clock import StepClock
from qfsdp.training.steps_in_backward import backward

__all__ = ["forward_backward", "optim_step", "save"]

AnyBatch = TypeVar("AnyBatch", bound=Batch)


def forward_backward(
    loss_of: Callable[[AnyBatch], Tensor],
    batches: Sequence[AnyBatch],
    optimizer: Optimizer,
    world: World,
    clock: StepClock | None = None,
    model: nn.Module | None = None,
    graphs: StepGraphs | None = None,
) -> Tensor:
    """Adds the gradients of a loss over all micro-batches of all ranks to those of the model.

    Every rank must call it, with the same number of micro-batches: passes contain collectives.

    Args:
        loss_of: the part of the loss that is a micro-batch's, a floating point scalar with
            gradients. The loss is the sum of all parts. For a mean, divide by the number of tokens
            or samples of *all* ranks and micro-batches: then nothing depends on how they are split.
        batches: this rank's micro-batches, on any device; `loss_of` gets them on the rank's.
        clock: takes the time of the phases "forward" and "backward"; of a replayed graph "graph".
        model: whose gradients are reduced once, with the last micro-batch, if
            `sharding.reduce_gradients` says so; None: with every micro-batch.
        graphs: of the run; `loss_of` must use the same tensors in every step then, besides its
            batch.

    Returns:
        The parts of this rank, summed; `[]`, without gradients. `optim_step` adds up the ranks'.
    """
    clock = clock or StepClock(world.device)
    loss = torch.zeros((), device=world.device)

    def captured(batch: AnyBatch) -> Tensor:  # without phases: a graph has no events of its own
        part = loss_of(batch)
        backward(part, optimizer, world)
        return part.detach()

    for number, batch in enumerate(batches, 1):
        reduce_gradients(model, now=number == len(batches))
        moved = cast(AnyBatch, batch.to(world.device))
        part = None if graphs is None else graphs.micro_batch(captured, moved, clock)
        if part is None:
            with clock.phase("forward"):
                part = loss_of(moved)
            with clock.phase("backward"):
                backward(part, optimizer, world)
        loss = loss + part.detach()
    return loss


def optim_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Tensor,
    world: World,
    *,
    clip: float | None = None,
    scheduler: LRScheduler | None = None,
    clock: StepClock | None = None,
    graphs: StepGraphs | None = None,
) -> dict[str, float]:
    """Updates the weights from the gradients that `forward_backward` has added up, and frees them.

    Nothing is updated if the loss or a gradient is NaN or infinite on any rank. `NonFiniteWatch`
    acts on such metrics, and adapts the loss scale of fp16: a loop that trains in fp16 needs one.

    Args:
        loss: of `forward_backward`.
        clip: largest norm of all gradients together; None: not clipped.
        scheduler: steps once, if the weights do.
        clock: takes the time of the phases "optimizer" and "norm_refresh".

    Returns:
        `loss` of all ranks, `grad_norm` before clipping, and `lr`; the same on every rank.
    """
    clock = clock or StepClock(world.device)
    with clock.phase("optimizer"):
        total, scale = loss.detach().double().view(1), loss_scale(optimizer)
        grad_norm = clip_grad_norm(trainable_parameters(model), clip, scale, total, world)
        read = step_if_finite(optimizer, total[0], grad_norm)
        optimizer.zero_grad()
    with clock.phase("norm_refresh"):
        # A and B have changed; they change nowhere else.
        refresh_dora_norms(model) if graphs is None else graphs.refresh_norms()
    metrics = read()  # the host waits only here, while the device has work
    if scheduler is not None and are_finite(metrics):
        scheduler.step()
    return metrics
