"""Loss on held-out samples: the mean over the target tokens of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from qfsdp.common.progress import moved
from qfsdp.data.batch import Batch
from qfsdp.data.loader import MapDataset, StepLoader
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import evaluating


def held_out_batches(
    dataset: MapDataset,
    batch_size: int,
    world: World,
    pad_id: int,
    max_seq_len: int | None,
    fill_rows: bool = False,
    context_parallel: int = 1,
) -> Iterator[Batch]:
    """This rank's batches of one pass over `dataset`, in order. Every rank gets the same number.

    Args:
        dataset: a dataset of samples or packs for `StepLoader`.
        batch_size: samples per rank and batch. A rank without samples gets a row without targets.
        pad_id, max_seq_len: as in `collate`.
        fill_rows, context_parallel: as in `StepLoader`.
    """
    loader = StepLoader(
        dataset,
        batch_size=batch_size,
        pad_id=pad_id,
        max_seq_len=max_seq_len,
        fill_rows=fill_rows,
        context_parallel=context_parallel,
        **in_order(world),
    )
    for step in range(loader.steps_per_epoch):
        yield from loader.step(step)


def in_order(world: World) -> dict[str, Any]:
    """The options of a `StepLoader` that reads the samples in their order."""
    ranks = {"rank": world.rank, "world_size": world.size, "gradient_accumulation_steps": 1}
    return {**ranks, "seed": 0, "shuffle": False}


def summed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a batch on the model's device, summed over its targets."""
    b = batch
    given = {"labels": b.labels, "cu_seqlens": b.cu_seqlens, "num_targets": b.num_targets}
    loss: torch.Tensor = model(b.tokens, b.positions, **given)
    return loss


def batch_losses(
    model: nn.Module, batches: Iterable[Batch], world: World
) -> list[tuple[float, int]]:
    """Summed loss (nats) and number of targets of each of this rank's batches.

    All ranks must call it with the same number of batches: forward passes have collectives.
    """
    losses: list[torch.Tensor] = []
    targets: list[int] = []
    with evaluating(model):
        for batch in batches:
            losses.append(summed_loss(model, batch.to(world.device)))
            targets.append(batch.num_targets)
            moved()
    # Reading the losses waits for the accelerator, so it happens once, at the end.
    sums = torch.stack(losses).tolist() if losses else []
    return list(zip(sums, targets, strict=True))


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinity where the exponential overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def held_out_loss(model: nn.Module, batches: Iterable[Batch], world: World) -> tuple[float, int]:
    """The cross entropy summed over all ranks' targets (nats), and the number of targets.

    Their ratio is the mean loss, and `math.exp` of that is the perplexity. The model may be in the
    middle of training: its mode and its sharding stay as they were.

    Args:
        model: a `Decoder`, sharded or not.
        batches: this rank's batches from `held_out_batches`; every rank must have the same number.
    """
    parts = batch_losses(model, batches, world)
    loss = world.sum(math.fsum(loss for loss, _ in parts))
    return loss, int(world.sum(sum(targets for _, targets in parts)))
