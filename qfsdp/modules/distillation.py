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
hidden state at every target token or, if its words were written before
(`qfsdp.training.teacher_cache`), its most likely tokens. Where ranks split the vocabulary, each has
some columns of both models' logits, and sums over columns are sums over ranks.
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
from qfsdp.modules.loss import chunk_functions, chunk_tokens

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
Logits = Callable[[Tensor], Tensor]  # hidden states `[n, hidden]` -> `[n, vocab]`
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


class Columns:
    """The columns of logits that a rank has: here all of the vocabulary. Ranks that split it have
    a class of their own (`qfsdp.distributed.split_vocabulary`)."""

    def largest(self, x: Tensor) -> Tensor:
        """The largest of every rank, of `x` `[n, 1]`."""
        return x

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all ranks, of `x` `[n, 1]`."""
        return x

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where tokens `ids` are among the columns, and whether they are (None: all are)."""
        return ids, None

    def own_sum(self, losses: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the summed losses `[n]`, `[]`."""
        return losses.sum()


ALL = Columns()


@dataclass(frozen=True)
class Targets:
    """Labels int64 `[n]`, and what a teacher says of the same tokens (`Taught.said`)."""

    labels: Tensor
    said: tuple[Tensor, ...]

    def __getitem__(self, rows: slice) -> Targets:
        return Targets(self.labels[rows], tuple(of[rows] for of in self.said))


class Taught:
    """What a teacher says of the target tokens of a micro-batch.

    Args:
        said: of the target tokens, in order: the teacher's last hidden states `[n, hidden]`; or,
            without `logits`, its most likely tokens, int32 `[n, k]`, and their log-probabilities,
            fp32 `[n, k]`.
        config: which divergence.
        sums: fp64 or fp32 `[2]`; the summed divergence and the labels' summed loss are added here.
        logits: of the teacher's output layer, or this rank's columns of them.
        tokens: columns that both models have; a vocabulary may be padded further than the other,
            and what pads it is no token. None: all of the student's.
    """

    def __init__(
        self,
        said: tuple[Tensor, ...],
        config: DistillationConfig,
        sums: Tensor,
        logits: Logits | None = None,
        tokens: int | None = None,
    ) -> None:
        self.said, self._config, self._sums, self._tokens = said, config, sums, tokens
        self._logits = logits

    def of_chunks(
        self, of_labels: LossesAndGradient, labels: Tensor, step: int, columns: Columns = ALL
    ) -> tuple[LossesAndGradient, Any, int]:
        """The loss in place of `of_labels`, the targets in place of `labels` int64 `[n]`, and the
        tokens of a chunk in place of `step`."""
        loss: Any = partial(self._losses_and_gradient_, of_labels, columns)
        return loss, Targets(labels, self.said), max(1, step // NUMBERS)

    def _losses_and_gradient_(
        self,
        of_labels: LossesAndGradient,
        columns: Columns,
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
        config, both = self._config, self._tokens
        weight = config.weight
        if self._logits is None:
            ids, logprobs = targets.said
            losses, grad = of_most_likely(logits[:, :both], ids, logprobs, config, columns)
        else:
            theirs = self._logits(*targets.said)[:, :both]
            losses, grad = divergence(logits[:, :both], theirs, config, columns)
        self._sums[0] += columns.own_sum(losses, targets.labels)
        losses = weight * losses
        if weight < 1:
            labelled, logits = of_labels(logits, targets.labels, None)
            self._sums[1] += columns.own_sum(labelled, targets.labels)
            losses, logits = losses + (1 - weight) * labelled, logits.mul_(1 - weight)
        else:
            logits.zero_()
        logits[:, :both] += grad.mul_(weight).to(logits.dtype)
        return losses, logits if weights is None else logits.mul_(weights.unsqueeze(1))


def divergence(
    student: Tensor, teacher: Tensor, config: DistillationConfig, columns: Columns = ALL
) -> tuple[Tensor, Tensor]:
    """The divergence of each row, fp32 `[n]`, and its gradient by the student's logits, fp32.

    Args:
        student, teacher: logits `[n, vocab]`, of any dtype; computed in fp32.
        columns: which of the vocabulary they are.
    """
    inverse = 1 / config.temperature
    ours = _log_softmax(student.float() * inverse, columns)
    theirs = _log_softmax(teacher.float() * inverse, columns)
    found: Callable[..., tuple[Tensor, Tensor]] = _DIVERGENCES[config.divergence]
    losses, grad = found(ours, theirs, config.beta, columns)
    return losses.squeeze(1), grad.mul_(inverse)


def of_most_likely(
    student: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    config: DistillationConfig,
    columns: Columns = ALL,
) -> tuple[Tensor, Tensor]:
    """`divergence` by the teacher's most likely tokens, forward KL.

    Args:
        ids: int32 or int64 `[n, k]`.
        logprobs: fp32 `[n, k]`, the teacher's; their sum may be below 1.
    """
    inverse = 1 / config.temperature
    ours = _log_softmax(student.float() * inverse, columns)
    theirs = (logprobs * inverse).log_softmax(1)
    shares = theirs.exp()
    places, mine = columns.places(ids.long())
    here = shares if mine is None else shares * mine
    of_ours = columns.summed((here * ours.gather(1, places)).sum(1, keepdim=True))
    losses = (shares * theirs).sum(1) - of_ours.squeeze(1)
    return losses, ours.exp_().scatter_add_(1, places, here.neg_()).mul_(inverse)


def teacher_logits(head: nn.Module, dtype: torch.dtype, rows: Any = None, first: int = 0) -> Logits:
    """The function that computes a teacher's logits; arguments as of `chunk_functions`."""
    logits, _ = chunk_functions(head, (), _no_loss, dtype, rows, first)
    return logits


def most_likely(logits: Logits, hidden: Tensor, count: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens of a teacher, int32 `[n, count]`, and their log-probabilities, fp32
    `[n, count]`.

    Args:
        hidden: `[n, hidden]`, its last hidden states.
        tokens: columns that are looked at, from the first one on.
    """
    ids = hidden.new_empty(len(hidden), count, dtype=torch.int32)
    logprobs = hidden.new_empty(len(hidden), count, dtype=torch.float32)
    step = max(1, chunk_tokens(tokens) // NUMBERS)
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        numbers = logits(hidden[part])[:, :tokens].float().log_softmax(1)
        logprobs[part], ids[part] = numbers.topk(count, 1)
    return ids, logprobs


def _log_softmax(logits: Tensor, columns: Columns) -> Tensor:
    if columns is ALL:
        return logits.log_softmax(1)
    logits = logits - columns.largest(logits.amax(1, keepdim=True))
    return logits - columns.summed(logits.exp().sum(1, keepdim=True)).log_()


def _forward_kl(
    ours: Tensor, theirs: Tensor, beta: float, columns: Columns
) -> tuple[Tensor, Tensor]:
    shares = theirs.exp()
    losses = columns.summed((shares * (theirs - ours)).sum(1, keepdim=True))
    return losses, ours.exp().sub_(shares)


def _reverse_kl(
    ours: Tensor, theirs: Tensor, beta: float, columns: Columns
) -> tuple[Tensor, Tensor]:
    apart, shares = ours - theirs, ours.exp()
    losses = columns.summed((shares * apart).sum(1, keepdim=True))
    return losses, apart.sub_(losses).mul_(shares)


def _jsd(ours: Tensor, theirs: Tensor, beta: float, columns: Columns) -> tuple[Tensor, Tensor]:
    middle = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
    of_theirs = columns.summed((theirs.exp() * (theirs - middle)).sum(1, keepdim=True))
    of_ours, grad = _reverse_kl(ours, middle, beta, columns)
    return beta * of_theirs + (1 - beta) * of_ours, grad.mul_(1 - beta)


_DIVERGENCES: dict[str, Any] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
}


def _no_loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The teacher's output layer has no loss of its own."""
    raise NotImplementedError
