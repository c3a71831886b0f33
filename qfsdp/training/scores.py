"""Reward models and classifiers: scores of rows, and the loss of an update.

Pairs: Bradley-Terry, -log sigmoid(r_chosen - r_rejected - margin) (arXiv:1706.03741; the margin as
in Llama 2, arXiv:2307.09288), and `head.center` times (r_chosen + r_rejected)^2. Labels: cross
entropy of the class. The loss is the mean over the pairs, or rows, of all ranks and micro-batches,
so it does not depend on how they are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.common.devices import sum_dtype
from qfsdp.data.preferences.batch import PairBatch
from qfsdp.distributed.world import World
from qfsdp.modules.score_head import HeadConfig
from qfsdp.training.locate_nonfinite import Part

PAIRS = ("loss", "accuracy", "rewards/chosen", "rewards/rejected", "rewards/margin")
LABELS = ("loss", "accuracy")


def last_scores(model: nn.Module, batch: PairBatch) -> Tensor:
    """The scores of every sample of a batch, at its last token: fp32 `[num_samples, classes]`."""
    given = {"cu_seqlens": batch.documents, "ends": batch.ends}
    scores: Tensor = model(batch.tokens, batch.positions, **given)
    return scores


class ScoreObjective:
    """What an update of a reward model or classifier minimizes; has the methods of `Objective`."""

    further_passes = 0  # without gradients

    def __init__(self, head: HeadConfig) -> None:
        self._head = head

    def check(self) -> None:
        """Nothing: `HeadConfig` has checked itself."""

    def takes(self, labels: bool) -> bool:
        """Whether rows have labels, or are pairs."""
        return labels == (self._head.classes > 1)

    def begin(self, batches: Sequence[PairBatch], world: World) -> ScoreUpdate:
        """Counts the pairs or labels of all ranks; every rank must call it."""
        paired = self.takes(labels=False)
        units = sum(b.num_samples // 2 if paired else b.num_samples for b in batches)
        return ScoreUpdate(self._head, max(int(world.sums(units)[0]), 1), world)

    def parts(
        self, model: nn.Module, batches: Sequence[PairBatch], world: World
    ) -> Callable[[PairBatch], list[Part]]:
        """The loss of an update for a second look (`StepParts`)."""
        update = self.begin(batches, world)

        def parts_of(batch: PairBatch) -> list[Part]:
            scores = last_scores(model, batch)
            return [Part("the loss of scores", update.loss(batch, scores), scores)]

        return parts_of


class ScoreUpdate:
    """The losses of one update's micro-batches, and what is logged of them.

    Args:
        units: pairs or labelled rows of all ranks.
    """

    def __init__(self, head: HeadConfig, units: int, world: World) -> None:
        self._head, self._units, self._world = head, units, world
        self._names = LABELS if head.classes > 1 else PAIRS
        dtype = sum_dtype(world.device)
        self._sums = torch.zeros(len(self._names), dtype=dtype, device=world.device)

    def loss(self, batch: PairBatch, scores: Tensor) -> Tensor:
        """The part of the update's loss that is a micro-batch's, `[]`, with gradients.

        Args:
            scores: of `last_scores`.
        """
        of_units = self._labels if self._head.classes > 1 else self._pairs
        losses, *numbers = of_units(batch, scores)
        self._sums += torch.stack([each.detach().double().sum() for each in (losses, *numbers)])
        return losses.double().sum() / self._units

    def _pairs(self, batch: PairBatch, scores: Tensor) -> list[Tensor]:
        chosen, rejected = scores[0::2, 0], scores[1::2, 0]
        apart = chosen - rejected
        losses = -F.logsigmoid(apart if batch.margins is None else apart - batch.margins)
        if self._head.center:
            losses = losses + self._head.center * (chosen + rejected) ** 2
        return [losses, apart > 0, chosen, rejected, apart]

    def _labels(self, batch: PairBatch, scores: Tensor) -> list[Tensor]:
        assert batch.desirable is not None
        classes = batch.desirable.long()
        losses = F.cross_entropy(scores, classes, reduction="none")
        return [losses, scores.argmax(1) == classes]

    def metrics(self) -> dict[str, float]:
        """What is logged of the update, means over the units of all ranks; every rank must call it.

        loss        added up in fp64 where the device has it
        accuracy    share of pairs whose chosen answer has the larger reward, or of right classes
        rewards/chosen, rewards/rejected, rewards/margin
                    of pairs
        """
        sums: Any = self._world.sum_of(self._sums).tolist()
        return {n: value / self._units for n, value in zip(self._names, sums, strict=True)}
