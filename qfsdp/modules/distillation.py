"""Distillation: how far the student's next tokens are from a teacher's, some tokens at a time.

With p and q the teacher's and the student's probabilities of every token, softmax(logits / T):

    forward_kl   KL(p || q): the student covers all that the teacher may say (arXiv:1503.02531)
    reverse_kl   KL(q || p): the student says only what the teacher may say (arXiv:2306.08543)
    jsd          beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, between
                 both (arXiv:2306.13649, as TRL's GKD computes it)

The gradient by the student's logits, times T, with d the divergence of the same name:

    forward_kl   q - p
    reverse_kl   q (log q - log p - d)
    jsd          (1 - beta) q (log q - log m - KL(q || m))

Neither model's logits ever exist for a whole micro-batch. What is kept of the teacher is its last
hidden state at every target token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qfsdp.common.errors import InvalidField
from qfsdp.modules.chunk_gradients import LossesAndGradient
from qfsdp.modules.loss import chunk_functions

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
NUMBERS = 4
"""Tensors of fp32 logits that exist beside those of a chunk; so a chunk has fewer tokens."""


@dataclass
class DistillationConfig:
    """Section `distillation`: what a student learns from its teacher.

    Fields:
        divergence: "forward_kl" (teacher to student), "reverse_kl" (student to teacher), or "jsd",
            their mixture (`qfsdp.modules.distillation`).
        beta: of "jsd": near 0 it is like forward_kl, near 1 like reverse_kl.
        temperature: divides the logits of both models. The loss is not multiplied by its square, so
            gradients fall with it, as in TRL.
        weight: of the divergence in the loss. The rest, up to 1, is that of the labels.
        top_k: the teacher's most likely tokens, between which its probability is shared out; null:
            all tokens. With forward_kl only: the others divide by the probability of any token.
    """

    divergence: Divergence = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    weight: float = 1.0
    top_k: int | None = None

    def check(self) -> None:
        if not 0 < self.beta < 1:
            raise InvalidField("beta", self.beta, "a number between 0 and 1")
        if not 0 < self.temperature < math.inf:
            raise InvalidField("temperature", self.temperature, "a number above 0")
        if not 0 < self.weight <= 1:
            raise InvalidField("weight", self.weight, "a number above 0, at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidField("top_k", self.top_k, "an integer of at least 1, or null")
        if self.top_k is not None and self.divergence != "forward_kl":
            raise InvalidField("top_k", self.top_k, f"null with {self.divergence}")


@dataclass(frozen=True)
class Targets:
    """Labels int64 `[n]` and the teacher's last hidden states `[n, hidden]` of the same tokens."""

    labels: Tensor
    hidden: Tensor

    def __getitem__(self, rows: slice) -> Targets:
        return Targets(self.labels[rows], self.hidden[rows])


class Taught:
    """What a teacher says of the target tokens of a micro-batch.

    Args:
        head: the teacher's output layer, gathered.
        hidden: `[n, hidden]`, the teacher's last hidden states at the target tokens, in order.
        config: which divergence.
        sums: fp64 or fp32 `[2]`; the summed divergence and the labels' summed loss are added here.
        rows: of the teacher's output layer, as of `head_loss`.
    """

    def __init__(
        self,
        head: nn.Module,
        hidden: Tensor,
        config: DistillationConfig,
        sums: Tensor,
        rows: Any = None,
    ) -> None:
        self._hidden, self._config, self._sums = hidden, config, sums
        self._logits, _ = chunk_functions(head, (), _no_loss, hidden.dtype, rows)

    def of_chunks(
        self, of_labels: LossesAndGradient, labels: Tensor, step: int
    ) -> tuple[LossesAndGradient, Any, int]:
        """The loss in place of `of_labels`, the targets in place of `labels` int64 `[n]`, and the
        tokens of a chunk in place of `step`."""
        loss: Any = partial(self._losses_and_gradient_, of_labels)
        return loss, Targets(labels, self._hidden), max(1, step // NUMBERS)

    def _losses_and_gradient_(
        self,
        of_labels: LossesAndGradient,
        logits: Tensor,
        targets: Targets,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The losses of tokens, fp32 `[n]`, and the gradient of their sum, which overwrites the
        student's logits `[n, vocab]`.

        Args:
            of_labels: gives the same of the labels' loss.
            weights: fp32 `[n]`, factors of the gradient's rows.
        """
        weight, theirs = self._config.weight, self._logits(targets.hidden)
        # A vocabulary may be padded further than the other; what pads it is no token.
        both = min(logits.size(1), theirs.size(1))
        losses, grad = divergence(logits[:, :both], theirs[:, :both], self._config)
        self._sums[0] += losses.sum()
        losses = weight * losses
        if weight < 1:
            labelled, logits = of_labels(logits, targets.labels, None)
            self._sums[1] += labelled.sum()
            losses, logits = losses + (1 - weight) * labelled, logits.mul_(1 - weight)
        else:
            logits.zero_()
        logits[:, :both] += grad.mul_(weight).to(logits.dtype)
        return losses, logits if weights is None else logits.mul_(weights.unsqueeze(1))


def divergence(
    student: Tensor, teacher: Tensor, config: DistillationConfig
) -> tuple[Tensor, Tensor]:
    """The divergence of each row, fp32 `[n]`, and its gradient by the student's logits, fp32.

    Args:
        student, teacher: logits `[n, vocab]`, of any dtype; computed in fp32.
    """
    inverse = 1 / config.temperature
    ours = (student.float() * inverse).log_softmax(1)
    if config.top_k is not None:
        theirs, ids = teacher.float().topk(config.top_k, 1)
        theirs = (theirs * inverse).log_softmax(1)
        losses = (theirs.exp() * (theirs - ours.gather(1, ids))).sum(1)
        return losses, ours.exp_().scatter_add_(1, ids, -theirs.exp_()).mul_(inverse)
    theirs = (teacher.float() * inverse).log_softmax(1)
    found: Callable[..., tuple[Tensor, Tensor]] = _DIVERGENCES[config.divergence]
    losses, grad = found(ours, theirs, config.beta)
    return losses.squeeze(1), grad.mul_(inverse)


def _forward_kl(ours: Tensor, theirs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    shares = theirs.exp()
    losses = (shares * (theirs - ours)).sum(1, keepdim=True)
    return losses, ours.exp().sub_(shares)


def _reverse_kl(ours: Tensor, theirs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    apart, shares = ours - theirs, ours.exp()
    losses = (shares * apart).sum(1, keepdim=True)
    return losses, apart.sub_(losses).mul_(shares)


def _jsd(ours: Tensor, theirs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    middle = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
    of_theirs = (theirs.exp() * (theirs - middle)).sum(1, keepdim=True)
    of_ours, grad = _reverse_kl(ours, middle, beta)
    return beta * of_theirs + (1 - beta) * of_ours, grad.mul_(1 - beta)


_DIVERGENCES: dict[str, Any] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
}


def _no_loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The teacher's output layer has no loss of its own."""
    raise NotImplementedError
