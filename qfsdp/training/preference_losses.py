"""Losses over the log-probabilities of answers: DPO and its family.

A loss is a function of `Answers` and of the numbers that the config gives it. It returns the loss
of each pair (or of each answer with a label), fp32 `[units]`, and the reward that it gives each
answer, fp32 `[samples]`, for the log. The recipe takes the mean over all units of an update. A loss
of your own is such a function in a file of yours; the config names it by its path:

    loss:
      _component_: my_losses.squared
      beta: 0.2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.common.errors import UserError

Loss = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Answers:
    """What a loss sees of a micro-batch. Answers come as chosen, rejected, chosen, rejected, ...

    Fields:
        logprobs: fp32 `[samples]`, the log-probability of each answer: the sum over its tokens.
        tokens: fp32 `[samples]`, the length of each answer.
        reference: fp32 `[samples]`, as `logprobs`, of the reference; None with `reference: none`.
        desirable: bool `[samples]`, the label of each answer; None: the answers are pairs.
        kl: fp32 `[]`, an estimate of the KL divergence from the reference, for KTO.
        good_tokens: tokens of good answers per pair (or answer with a label) of the whole update.
    """

    logprobs: Tensor
    tokens: Tensor
    reference: Tensor | None = None
    desirable: Tensor | None = None
    kl: Tensor | None = None
    good_tokens: float = 1.0

    @property
    def ratios(self) -> Tensor:
        """The log of the probability over the reference's, `[samples]`; raises without one."""
        if self.reference is None:
            raise UserError("needs a reference; expected reference=base or reference=start")
        return self.logprobs - self.reference

    @property
    def means(self) -> Tensor:
        """The mean log-probability of the tokens of each answer, `[samples]`."""
        return self.logprobs / self.tokens.clamp(min=1)

    @property
    def is_good(self) -> Tensor:
        """Whether each answer is chosen, or has the better label, bool `[samples]`."""
        if self.desirable is not None:
            return self.desirable
        return torch.arange(len(self.logprobs), device=self.logprobs.device) % 2 == 0

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the chosen and of the rejected answers, `[pairs]` each, of `[samples]`."""
        if self.desirable is not None:
            raise UserError("needs pairs; expected a dataset of chosen and rejected answers")
        return values[0::2], values[1::2]

    def margins(self, values: Tensor) -> Tensor:
        """Chosen minus rejected, `[pairs]`."""
        chosen, rejected = self.pairs(values)
        return chosen - rejected


def sigmoid(answers: Answers, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """DPO (arXiv:2305.18290); with `label_smoothing`, the share of pairs that are the wrong way
    round, conservative DPO (https://ericmitchell.ai/cdpo.pdf)."""
    rewards = beta * answers.ratios
    margins = answers.margins(rewards)
    return _smoothed(margins, label_smoothing), rewards


def robust(answers: Answers, beta: float = 0.1, label_smoothing: float = 0.1) -> Loss:
    """DPO whose expectation is unbiased if a share `label_smoothing` of the pairs, below 0.5, is
    the wrong way round (arXiv:2403.00409)."""
    rewards = beta * answers.ratios
    right, wrong = (-F.logsigmoid(sign * answers.margins(rewards)) for sign in (1, -1))
    share = label_smoothing
    return ((1 - share) * right - share * wrong) / (1 - 2 * share), rewards


def ipo(answers: Answers, beta: float = 0.1) -> Loss:
    """IPO (arXiv:2310.12036) over mean log-probabilities, as its authors advise: the square of sums
    would grow with the length. `beta` is the paper's tau."""
    ratios = answers.ratios
    margins = answers.margins(ratios / answers.tokens.clamp(min=1))
    return (margins - 1 / (2 * beta)) ** 2, beta * ratios


def hinge(answers: Answers, beta: float = 0.1) -> Loss:
    """A hinge at a margin of 1 between rewards (SLiC, arXiv:2305.10425, on DPO's rewards)."""
    rewards = beta * answers.ratios
    return torch.relu(1 - answers.margins(rewards)), rewards


def simpo(
    answers: Answers, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Loss:
    """SimPO (arXiv:2405.14734): mean log-probabilities with a margin `gamma`, no reference."""
    rewards = beta * answers.means
    return _smoothed(answers.margins(rewards) - gamma, label_smoothing), rewards


def orpo(answers: Answers, beta: float = 0.1) -> Loss:
    """ORPO (arXiv:2403.07691): the loss of SFT on the chosen answer and `beta` times the odds ratio
    of mean log-probabilities; no reference."""
    # The odds of probability 1 are infinite: the largest fp32 below it is 1 - 6e-8.
    means = answers.means.clamp(max=-6e-8)
    log_odds = means - torch.log(-torch.expm1(means))
    return sft(answers)[0] - beta * F.logsigmoid(answers.margins(log_odds)), beta * answers.means


def kto(
    answers: Answers,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """KTO (arXiv:2402.01306) of answers with labels. The weights even out unequal numbers of good
    and bad answers."""
    if answers.desirable is None or answers.kl is None:
        raise UserError("needs answers with labels; expected a dataset of them, not of pairs")
    good, rewards = answers.desirable, beta * answers.ratios
    gain = torch.where(good, 1.0, -1.0) * (rewards - beta * answers.kl)
    weights = torch.where(good, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(gain)), rewards


def sft(answers: Answers) -> Loss:
    """Cross entropy of the chosen (or desirable) answers: over all pairs the mean of these is the
    mean over the tokens of the chosen answers. For mixes (RPO, arXiv:2404.19733)."""
    losses = -answers.logprobs / answers.good_tokens
    if answers.desirable is not None:
        return losses * answers.desirable, answers.logprobs
    return answers.pairs(losses)[0], answers.logprobs


def _smoothed(margins: Tensor, label_smoothing: float) -> Tensor:
    """-log of the probability that the pair is the right way round, in that share of the cases."""
    right, wrong = -F.logsigmoid(margins), -F.logsigmoid(-margins)
    return (1 - label_smoothing) * right + label_smoothing * wrong
