"""Preference tuning: log-probabilities of answers, the reference's, and the loss of an update.

The loss is the mean over the pairs (or labelled answers) of all ranks and micro-batches. What a
loss needs of the whole update is summed over all of them before the first pass. So it does not
depend on how samples are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from qfsdp.common.devices import sum_dtype
from qfsdp.common.errors import UserError
from qfsdp.common.messages import did_you_mean, first_line, nearest
from qfsdp.config.component import Component, passed_by_name
from qfsdp.data.preferences.batch import PairBatch
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.reference import Reference, as_reference
from qfsdp.modules.hub_models.config import AnyConfig, HubConfig
from qfsdp.modules.hub_models.refused import unsupported
from qfsdp.training.locate_nonfinite import Part
from qfsdp.training.preference_losses import Answers, Loss
from qfsdp.training.scores import ScoreObjective as ScoreObjective
from qfsdp.training.scores import last_scores as last_scores

Losses = Component | list[Any]
"""A loss by its name or path with arguments, or a list of mappings to mix, see `read_terms`."""
LOSSES = ("sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "kto", "sft")


def check_packed(packed: bool, max_seq_len: int, config: AnyConfig) -> None:
    """Raises UserError where the answers of a pair could not share their prompt in a row: LongRoPE
    would turn it in one way for a short answer and in another for a long one, and transformers'
    masks do not have such rows."""
    if packed and isinstance(config, HubConfig):
        raise unsupported("packed: true", "false for pairs", config)
    if packed and getattr(config, "recurrent", None) is not None:
        why = "recurrent layers do not branch where answers share their prompt"
        raise UserError(f"packed: true; expected false for pairs: {why}")
    context = config.most_positions(1)
    if packed and context < max_seq_len:
        raise UserError(
            f"packed: true, and max_seq_len ({max_seq_len}) is longer than the original context of "
            f"LongRoPE; expected packed=false, or max_seq_len={context}"
        )


def sequence_logprobs(model: nn.Module, batch: PairBatch) -> Tensor:
    """The log-probability of every answer of a batch, the sum over its tokens: fp32
    `[num_samples]`, with gradients. Whole logits never exist."""
    summed: Tensor = model(
        batch.tokens,
        batch.positions,
        labels=batch.labels,
        cu_seqlens=batch.documents,
        sample_ids=batch.sample_ids,
        num_samples=batch.num_samples,
        num_targets=batch.num_targets,
    )
    return -summed


@dataclass(frozen=True)
class Term:
    """One of the losses that are added up.

    Fields:
        key: its place in the config.
        component: the function and its arguments.
        weight: its factor.
    """

    key: str
    component: Component
    weight: float = 1.0

    def __call__(self, answers: Answers) -> Loss:
        return cast(Loss, self.component.call(answers))


def read_terms(loss: Losses) -> list[Term]:
    """The terms of a config's `loss`: a component, or a list of mappings with `name` (one of
    `LOSSES`) or `_component_`, `weight` and arguments. Raises UserError: an entry is something
    else."""
    if isinstance(loss, Component):
        return [Term("loss", _named("loss", loss.path, loss.kwargs))]
    terms = []
    for at, entry in enumerate(loss):
        key = f"loss[{at}]"
        entry = dict(entry) if isinstance(entry, dict) else {"name": entry}
        path = entry.pop("_component_", entry.pop("name", None))
        weight = entry.pop("weight", 1.0)
        if not isinstance(path, str):
            raise UserError(f"{key}: expected a mapping with name, weight and arguments")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise UserError(f"{key}.weight: {weight!r} is not valid; expected a number above 0")
        terms.append(Term(key, _named(key, path, entry), float(weight)))
    if not terms:
        raise UserError(f"loss: [] is not valid; expected one of {', '.join(LOSSES)}")
    return terms


def _named(key: str, path: str, kwargs: dict[str, Any]) -> Component:
    if "." in path:
        return Component(path, kwargs, key)
    if path not in LOSSES:
        known = f"expected one of {', '.join(LOSSES)}, or the path of a function"
        near = "sigmoid" if path == "dpo" else nearest(path, LOSSES)  # its letters are ipo's
        raise UserError(f"{key}: '{path}' is no loss; {known}{did_you_mean(near)}")
    return Component(f"qfsdp.training.preference_losses.{path}", kwargs, key)


class Objective:
    """What an update of preference tuning minimizes.

    Args:
        loss: as `read_terms` takes it.
        reference: "base", "start" or "none", see `qfsdp.modules.adapters.reference`.
        paired: whether the data are pairs, or answers with labels; None: not known yet.

    Attributes:
        terms: the losses that are added up. The rewards of the first are logged.

    Raises:
        UserError: a loss does not exist, or needs other data.
    """

    def __init__(self, loss: Losses, reference: Reference, paired: bool | None = None) -> None:
        self.terms, self._reference = read_terms(loss), reference
        if paired is not None and (wrong := self._trial(labels=not paired)):
            raise UserError(wrong[0])

    def check(self) -> None:
        """Tries every loss on four answers. Raises UserError: a loss does not exist, does not take
        its arguments, needs a reference and has none, or returns something else than losses and
        rewards; or some of the losses need pairs and others labels."""
        for term in self.terms:
            _check_arguments(term)
        paired, labelled = self._trial(labels=False), self._trial(labels=True)
        if paired and labelled:
            raise UserError(paired[0] if len(paired) <= len(labelled) else labelled[0])

    def takes(self, labels: bool) -> bool:
        """Whether the losses take answers with labels, or pairs."""
        return not self._trial(labels)

    @property
    def further_passes(self) -> int:
        """Forward passes without gradients, per pass of training: the reference's and, of answers
        with labels, two over mismatched answers."""
        labelled = not self.takes(labels=False)
        return (self._reference != "none") * (3 if labelled else 1)

    def _trial(self, labels: bool) -> list[str]:
        """What is wrong with the terms over pairs or labelled answers."""
        values = torch.tensor([-3.0, -4.0, -2.0, -6.0])
        answers = Answers(
            values,
            torch.full((4,), 2.0),
            None if self._reference == "none" else values - 0.5,
            torch.tensor([True, False, True, False]) if labels else None,
            torch.tensor(0.1),
            2.0,
        )
        wrong = []
        for term in self.terms:
            try:
                losses, rewards = term(answers)
                sizes = (len(losses), len(rewards))
                finite = all(map(math.isfinite, [*losses.tolist(), *rewards.tolist()]))
            except UserError as error:
                wrong.append(f"{term.key}: '{term.component.path}' {error}")
                continue
            except Exception as error:  # a user's function may raise anything
                reason = f"{type(error).__name__}: {first_line(error)}"
                wrong.append(f"{term.key}: '{term.component.path}' fails on four answers: {reason}")
                continue
            units = 4 if labels else 2
            if sizes != (units, 4) or not finite:
                wrong.append(
                    f"{term.key}: '{term.component.path}' returned {sizes[0]} losses and {sizes[1]}"
                    f" rewards of four answers; expected {units} and 4 finite numbers"
                )
        return wrong

    def reference(self, model: nn.Module, batch: PairBatch) -> Tensor | None:
        """`sequence_logprobs` of the reference; None with `reference: none`."""
        if self._reference == "none":
            return None
        if batch.reference_logprobs is not None:
            return batch.reference_logprobs
        with as_reference(model):
            return sequence_logprobs(model, batch)

    def begin(self, model: nn.Module, batches: Sequence[PairBatch], world: World) -> Update:
        """Sums over all ranks what the losses of an update share. Every rank must call it.

        Args:
            batches: this rank's micro-batches; all are pairs, or all have labels.
        """
        units = good = kl = 0.0
        for batch in batches:
            tokens, labels = batch.targets_of_samples(), batch.desirable
            units += batch.num_pairs if labels is None else batch.num_samples
            good += int((tokens[0::2] if labels is None else tokens[labels]).sum())
            kl += self._mismatched_ratio(model, batch, world)
        units, good, kl = world.sums(units, good, kl)
        units = max(units, 1)
        return Update(self.terms, units, max(good, 1) / units, max(kl / units, 0.0), world)

    def parts(
        self, model: nn.Module, batches: Sequence[PairBatch], world: World
    ) -> Callable[[PairBatch], list[Part]]:
        """The losses of an update one by one, for a second look (`StepParts`)."""
        update = self.begin(model, batches, world)
        return lambda b: update.parts(b, self.reference(model, b), sequence_logprobs(model, b))

    @torch.no_grad()
    def _mismatched_ratio(self, model: nn.Module, batch: PairBatch, world: World) -> float:
        """The log-probabilities of mismatched answers over the reference's, summed."""
        if batch.mismatched is None:
            return 0.0
        mismatched = batch.mismatched.to(world.device)
        reference = self.reference(model, mismatched)
        if reference is None:
            return 0.0
        return (sequence_logprobs(model, mismatched) - reference).double().sum().item()


def step_options(cfg: Any) -> dict[str, Any]:
    """What the `train_step` of a config's recipe takes besides the arguments of all recipes."""
    if hasattr(cfg, "head"):  # of a reward model
        return {"objective": ScoreObjective(cfg.head)}
    return {"objective": Objective(cfg.loss, cfg.reference)} if hasattr(cfg, "reference") else {}


class Update:
    """The losses of one update's micro-batches, and what is logged of them.

    Args:
        units: pairs or labelled answers of all ranks.
        good_tokens: tokens of good answers per unit.
        kl: KTO's estimate of the KL divergence.
    """

    NUMBERS = ("loss", "right", "good", "bad")
    SUMS = ("rewards", "logps", "ratios", "tokens")

    def __init__(
        self, terms: Sequence[Term], units: float, good_tokens: float, kl: float, world: World
    ) -> None:
        self._terms, self._units, self._good_tokens = terms, units, good_tokens
        self._kl, self._world = torch.tensor(kl, device=world.device), world
        size = len(self.NUMBERS) + 2 * len(self.SUMS)
        dtype = sum_dtype(world.device)
        self._sums = torch.zeros(size, dtype=dtype, device=world.device)
        self._has_reference = self._has_pairs = False

    def loss(self, batch: PairBatch, reference: Tensor | None, logprobs: Tensor) -> Tensor:
        """The part of the update's loss that is a micro-batch's, fp64 `[]`, with gradients.

        In fp64, so that n equal fp32 losses have exactly their mean: ln 2 before the first update.

        Args:
            reference: of `Objective.reference`.
            logprobs: of `sequence_logprobs`.
        """
        answers = self._answers(batch, reference, logprobs)
        results = [term(answers) for term in self._terms]
        weighted = zip(self._terms, results, strict=True)
        summed = torch.stack([t.weight * losses.double().sum() for t, (losses, _) in weighted])
        loss = summed.sum()
        self._add(answers, loss, results[0][1])
        return loss / self._units

    def parts(self, batch: PairBatch, reference: Tensor | None, logprobs: Tensor) -> list[Part]:
        """What `loss` adds up, one by one."""
        parts = []
        for term in self._terms:
            own = logprobs.clone()
            losses = term(self._answers(batch, reference, own))[0].double()
            loss = term.weight * losses.sum() / self._units
            parts.append(Part(f"{term.key} '{term.component.path}'", loss, own))
        return parts

    def _answers(self, batch: PairBatch, reference: Tensor | None, logprobs: Tensor) -> Answers:
        return Answers(
            logprobs,
            batch.targets_of_samples().float(),
            reference,
            batch.desirable,
            None if batch.desirable is None else self._kl,
            self._good_tokens,
        )

    @torch.no_grad()
    def _add(self, answers: Answers, loss: Tensor, rewards: Tensor) -> None:
        good = answers.is_good
        right = torch.zeros_like(loss)
        if answers.desirable is None:
            self._has_pairs = True
            right = (answers.margins(rewards) > 0).sum().double()
        ratios = torch.zeros_like(rewards)
        if answers.reference is not None:
            self._has_reference, ratios = True, answers.ratios
        of_both = torch.stack([rewards, answers.logprobs, ratios, answers.tokens]).double()
        sums = [(of_both * which).sum(1) for which in (good, ~good)]
        self._sums += torch.cat([torch.stack([loss, right, good.sum(), (~good).sum()]), *sums])

    def metrics(self) -> dict[str, float]:
        """What is logged of the update, over all ranks; every rank must call it.

        loss                      exactly, for the sum of the ranks' parts is rounded
        rewards/chosen, rewards/rejected, rewards/margin
                                  means over answers, of the first loss. Answers with labels may
                                  all be good or all be bad: there is no mean of the others then
        rewards/accuracy          share of pairs whose chosen answer has the larger reward
        logps/chosen, logps/rejected
                                  mean log-probability of an answer, the sum over its tokens
        kl                        mean per token of the log-probability over the reference's: an
                                  estimate from the data's answers, not from the model's own
        """
        sums = self._world.sum_of(self._sums).tolist()
        loss, right, *counts = sums[:4]
        good, bad = sums[4:8], sums[8:12]
        metrics = {"loss": loss / self._units}
        for kind, of, count in zip(("chosen", "rejected"), (good, bad), counts, strict=True):
            if count:
                metrics |= {f"rewards/{kind}": of[0] / count, f"logps/{kind}": of[1] / count}
        if all(counts):
            metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if self._has_pairs:
            metrics["rewards/accuracy"] = right / max(counts[0], 1)
        if self._has_reference:
            metrics["kl"] = (good[2] + bad[2]) / max(good[3] + bad[3], 1)
        return metrics


def _check_arguments(term: Term) -> None:
    """Checks the arguments of a loss by its signature, and the range of those that all losses
    share."""
    component = term.component
    first = next(iter(passed_by_name(component.resolve(term.key))), "answers")  # by any name
    component.check(term.key, provided=[first])
    given = component.kwargs
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        if name in given and not given[name] > 0:
            raise UserError(f"{term.key}.{name}: {given[name]}; expected a number above 0")
    if not 0 <= given.get("label_smoothing", 0) < 0.5:
        value = given["label_smoothing"]
        raise UserError(f"{term.key}.label_smoothing: {value}; expected at least 0, below 0.5")
