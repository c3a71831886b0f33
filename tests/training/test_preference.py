"""Losses and gradients of preference tuning against dense autograd; the reference; mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.adapter_start import start_adapters
from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.data.preferences.batch import PairBatch
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.reference import keep_start
from qfsdp.modules.transformer import Decoder
from qfsdp.training.preference import Losses, Objective, sequence_logprobs
from qfsdp.training.preference_losses import Answers, Loss
from tests.models import adapted_model, cpu_world, load_model, randomize_adapters
from tests.preferences import preference_batch, random_samples
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
DORA = AdapterConfig("dora", rank=3, alpha=5.0, targets=["q_proj", "down_proj", "lm_head"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("preference") / "m", hidden_size=96)


def policy(folder: Path, config: AdapterConfig = DORA) -> Decoder:
    """A model with adapters as after training."""
    model = adapted_model(folder, config)
    randomize_adapters(model)
    return model


def dense_logprobs(model: Decoder, batch: PairBatch) -> Tensor:
    """The log-probability of each answer of a padded batch from whole logits, one at a time."""
    found = []
    for number in range(batch.num_samples):
        mine = batch.sample_ids == number
        row = int(mine.any(1).nonzero()[0])
        tokens, labels = batch.tokens[row][mine[row]], batch.labels[row][mine[row]]
        real = int((labels != -100).nonzero().max()) + 1  # a row's padding has its number too
        tokens, labels = tokens[:real], labels[:real]
        logits = model(tokens.unsqueeze(0))[0].float().log_softmax(1)
        at = (labels != -100).nonzero().squeeze(1)
        found.append(logits[at, labels[at]].sum())
    return torch.stack(found)


def dense_loss(name: str, p: Tensor, r: Tensor, n: Tensor, y: Tensor, kl: Tensor) -> Tensor:
    """The mean loss, written as in the papers. `p`, `r`: log-probabilities of the policy and of the
    reference, `n`: tokens, `y`: labels."""
    c, d = (p - r)[0::2], (p - r)[1::2]
    mean, good = p / n, n[0::2].sum()
    log_odds = (mean.exp() / (1 - mean.exp())).log()
    desired = (1 - torch.sigmoid(0.1 * (p - r - kl)))[y]
    undesired = (1 - torch.sigmoid(0.1 * (kl - (p - r))))[~y]
    sft = -p[0::2].sum() / good
    of_orpo = torch.sigmoid(log_odds[0::2] - log_odds[1::2]).log().mean()
    losses: dict[str, Callable[[], Tensor]] = {
        "sigmoid": lambda: -torch.sigmoid(0.1 * (c - d)).log().mean(),
        "robust": lambda: (
            (-0.9 * F.logsigmoid(0.1 * (c - d)) + 0.1 * F.logsigmoid(0.1 * (d - c))) / 0.8
        ).mean(),
        "ipo": lambda: ((c / n[0::2] - d / n[1::2] - 5) ** 2).mean(),
        "hinge": lambda: (1 - 0.1 * (c - d)).clamp(min=0).mean(),
        "simpo": lambda: -F.logsigmoid(2 * (mean[0::2] - mean[1::2]) - 1).mean(),
        "orpo": lambda: sft - 0.1 * of_orpo,
        "kto": lambda: torch.cat([desired, undesired]).mean(),
        "sft": lambda: sft,
    }
    return losses[name]()


@pytest.mark.parametrize(
    "slots", [None, pytest.param(64, marks=pytest.mark.long)], ids=["padded", "packed"]
)
@pytest.mark.parametrize(
    "name", ["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "kto", "sft"]
)
def test_gradients_of_every_loss(name: str, slots: int | None, folder: Path) -> None:
    """Against whole logits, of all adapters, that of the output layer included. The batch is split
    into unequal micro-batches."""
    model, samples = policy(folder), random_samples(8)
    labels = [True, False, False, True, True, False, True, False] if name == "kto" else None
    parts = [(0, 6), (6, 8)]
    batches = [preference_batch(samples[a:b], labels and labels[a:b], slots) for a, b in parts]
    objective = Objective(Component(name), "base")
    objective.check()
    update = objective.begin(model, batches, cpu_world())
    for batch in batches:
        reference = objective.reference(model, batch)
        update.loss(batch, reference, sequence_logprobs(model, batch)).backward()
    trained = [param for param in model.parameters() if param.requires_grad]
    found = [param.grad for param in trained]

    base = load_model(folder)
    batches = [preference_batch(samples[a:b], labels and labels[a:b]) for a, b in parts]
    with torch.no_grad():
        r = torch.cat([dense_logprobs(base, batch) for batch in batches])
        kl = torch.zeros(())
        if name == "kto":
            others = [batch.mismatched for batch in batches if batch.mismatched]
            pairs = [(dense_logprobs(model, b), dense_logprobs(base, b)) for b in others]
            kl = torch.cat([mine - theirs for mine, theirs in pairs]).mean().clamp(min=0)
    p = torch.cat([dense_logprobs(model, batch) for batch in batches])
    n = torch.cat([batch.targets_of_samples() for batch in batches]).float()
    loss = dense_loss(name, p, r, n, torch.tensor(labels or [True] * 8), kl)
    assert update.metrics()["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for mine, theirs in zip(found, torch.autograd.grad(loss, trained), strict=True):
        assert mine is not None and theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def test_a_mix_adds_up(folder: Path) -> None:
    """Of weights, and of a function of one's own."""
    model, batch = policy(folder), preference_batch(random_samples(4))

    def loss(losses: Losses) -> dict[str, float]:
        objective = Objective(losses, "base")
        objective.check()
        update = objective.begin(model, [batch], cpu_world())
        update.loss(batch, objective.reference(model, batch), sequence_logprobs(model, batch))
        return update.metrics()

    own = "tests.training.test_preference.squared"
    parts = [loss([{"name": "sigmoid", "beta": 0.3}]), loss(["sft"]), loss(Component(own))]
    mix = [{"name": "sigmoid", "weight": 0.5, "beta": 0.3}, "sft", {"_component_": own}]
    found = loss(mix)
    expected = 0.5 * parts[0]["loss"] + parts[1]["loss"] + parts[2]["loss"]
    assert found.pop("loss") == pytest.approx(expected, rel=1e-6)
    assert found == {key: value for key, value in parts[0].items() if key != "loss"}


def squared(answers: Answers, beta: float = 1.0) -> Loss:
    """A loss of a user's own."""
    rewards = beta * answers.ratios
    return (answers.margins(rewards) - 1) ** 2, rewards


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("reference", ["base", "start"])
def test_the_reference_is_the_start(
    method: Any, reference: Any, folder: Path, tmp_path: Path
) -> None:
    """To the last bit before an update; after it the reference is the same as before, and another
    run that resumes makes the same one."""
    config = replace(DORA, method=method)
    if reference == "start":
        save_adapter(policy(folder, config), config, str(folder), tmp_path, cpu_world())
        config = replace(config, start_from=str(tmp_path))
    batch, objective = preference_batch(random_samples(6)), Objective(["sigmoid"], reference)
    found = []
    for resumed in (False, True):
        model = adapted_model(folder, config)
        keep_start(model, reference, config)
        start_adapters(model, config, str(folder), 0, resumed)
        model.train()
        if not resumed:
            with torch.no_grad():
                assert torch.equal(
                    sequence_logprobs(model, batch), one := objective.reference(model, batch)
                )
            found.append(one)
        randomize_adapters(model)
        assert not torch.equal(sequence_logprobs(model, batch), found[0])
        found.append(objective.reference(model, batch))
        assert model.training
    assert all(torch.equal(found[0], other) for other in found[1:])
    if reference == "base":
        plain = sequence_logprobs(load_model(folder), batch)
        torch.testing.assert_close(found[0], plain, rtol=1e-6, atol=1e-5)


MISTAKES: dict[str, tuple[Losses, Any, str]] = {
    "a name": (Component("sigmiod"), "base", "loss: 'sigmiod' is no loss; .*sigmoid"),
    "another name": (Component("dpo"), "base", "'dpo' is no loss; .*did you mean 'sigmoid'"),
    "a path": (Component("my.loss"), "base", "'my.loss' does not exist"),
    "an argument": (Component("sigmoid", {"betta": 1}), "base", "'betta'.*beta"),
    "a number": (Component("ipo", {"beta": 0.0}), "base", "loss.beta: 0.0; expected a number"),
    "smoothing": (
        [{"name": "robust", "label_smoothing": 0.5}],
        "base",
        r"loss\[0\].label_smoothing: 0.5; expected at least 0, below 0.5",
    ),
    "a weight": ([{"name": "sft", "weight": 0}], "none", r"loss\[0\].weight: 0 is not valid"),
    "no reference": (Component("sigmoid"), "none", "needs a reference; expected reference=base"),
    "pairs and labels": (["sigmoid", "kto"], "base", "needs (pairs|answers with labels)"),
    "nothing": ([], "base", r"loss: \[\] is not valid; expected one of sigmoid"),
    "its result": (Component("tests.training.test_preference.scalar"), "base", "returned 1 losses"),
}


def scalar(answers: Answers) -> Loss:
    """Not a loss of each pair."""
    return answers.logprobs[:1], answers.logprobs


def short(a: Answers, beta: float = 1.0) -> Loss:
    """A loss that names its answers otherwise."""
    return beta * a.margins(a.logprobs), a.logprobs


def test_a_loss_names_its_answers_as_it_likes() -> None:
    Objective(Component("tests.training.test_preference.short", {"beta": 2.0}), "base").check()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str) -> None:
    loss, reference, words = MISTAKES[name]
    with pytest.raises(UserError, match=words) as found:
        Objective(loss, reference).check()
    assert "\n" not in str(found.value)


def test_a_rank_without_samples(folder: Path) -> None:
    """Its passes take part in collectives, and count nothing."""
    model = policy(folder)
    batches = [preference_batch(random_samples(2)), preference_batch([])]
    objective = Objective(["sigmoid"], "base")
    update = objective.begin(model, batches, cpu_world())
    for batch in batches:
        part = update.loss(
            batch, objective.reference(model, batch), sequence_logprobs(model, batch)
        )
        part.backward()
    assert part.item() == 0.0 and math.isfinite(update.metrics()["loss"])
