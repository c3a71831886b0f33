"""Held-out preferences during training, and cached references, in runs of the recipe."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.training.preference_losses import Answers, Loss
from tests.json_lines import metric_lines
from tests.ranks import run_ranks
from tests.tiny import load_recipe, run_in_turn, write_tiny_run
from tests.toy_data import TOY_PAIRS

pytestmark = pytest.mark.usefixtures("eager")
LN_2 = float(torch.tensor(2.0).log())
CONFIG = """
output_dir: {folder}/run
adapter: {{rank: 5, alpha: 7}}
global_batch_size: 6
epochs: 3
validation:
  eval_every: 2
  at_start: true
  metric: held_out/rewards/accuracy
  sets:
    held_out: {{_component_: tests.preferences.preferences, size: 7, seed: 5}}
    seen: {{_component_: tests.preferences.preferences, seed: 0}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("preference_validation"), TOY_PAIRS + CONFIG)


train = partial(run_in_turn, "dpo_distributed")


def run(folder: Path, out: Path, size: int, *words: str) -> dict[int, dict[str, float]]:
    """Step -> metrics of it and of its evaluation, without those of speed."""
    run_ranks(size, train, folder, [f"output_dir={out}", *words])
    found: dict[int, dict[str, float]] = {}
    for metrics in metric_lines(out):
        of_step = found.setdefault(metrics.pop("step"), {})
        kept = ("loss", "grad_norm", "rewards/", "logps/", "kl", "validation/")
        of_step.update({name: x for name, x in metrics.items() if name.startswith(kept)})
    return found


def close(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for step, metrics in one.items():
        assert metrics == pytest.approx(other[step], rel=1e-5, abs=1e-5), step


@pytest.fixture(scope="module")
def live(folder: Path) -> dict[int, dict[str, float]]:
    return run(folder, folder / "live", 1, "batch_size=6")


def test_evaluations(folder: Path, live: dict[int, dict[str, float]]) -> None:
    assert sorted(live) == [0, 1, 2, 3, 4, 5, 6]
    assert live[1]["loss"] == LN_2
    for name in ("seen", "held_out"):
        assert live[0][f"validation/{name}/loss"] == LN_2
        assert live[0][f"validation/{name}/rewards/margin"] == 0
    assert live[6]["validation/seen/rewards/accuracy"] > 0.9
    assert live[6]["validation/seen/rewards/margin"] > live[2]["validation/seen/rewards/margin"] > 0
    accuracies = {step: live[step]["validation/held_out/rewards/accuracy"] for step in (0, 2, 4, 6)}
    best = json.loads((folder / "live/best/best.json").read_text())
    assert accuracies[best["step"]] == max(accuracies.values())
    assert best["metric"] == "held_out/rewards/accuracy" and (folder / "live/best").is_dir()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param(2, ["batch_size=1", "reference_logprobs=cache"], marks=pytest.mark.long),
        pytest.param(1, ["reference_logprobs=cache"], marks=pytest.mark.slow),
        pytest.param(3, ["batch_size=2"], marks=pytest.mark.slow),
    ],
)
def test_the_same_cached_and_on_other_ranks(
    size: int, words: list[str], folder: Path, live: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    found = run(folder, tmp_path / "run", size, *words)
    close(found, live)
    assert found[1]["loss"] == LN_2
    assert (tmp_path / "run/reference_logprobs").is_dir() == ("cache" in words[-1])


LABELS = ["loss=kto", "batch_size=6", "dataset.labels=true", "validation.sets.held_out.labels=true"]
LABELS += ["validation.sets.seen.labels=true"]


def test_no_mean_of_answers_that_a_batch_does_not_have(folder: Path, tmp_path: Path) -> None:
    """Of answers with labels a batch may have good ones only. Their log-probability was logged as
    0, which is certainty, and the margin as the reward of the good ones."""
    alone = ["validation.sets.held_out.size=1", "max_steps=2", "global_batch_size=1"]
    margin = ["validation.metric=held_out/rewards/margin", "validation.sets.held_out.seed=5"]
    words = [*LABELS[:1], "batch_size=1", *LABELS[2:], *alone, *margin]
    found = run(folder, tmp_path / "run", 1, *words)
    for of_step in (0, 2):
        numbers = found[of_step]
        held_out = {name for name in numbers if name.startswith("validation/held_out/")}
        kinds = ("loss", "rewards/chosen", "logps/chosen", "kl")
        assert held_out == {f"validation/held_out/{kind}" for kind in kinds}
        means = (numbers[f"validation/seen/rewards/{kind}"] for kind in ("chosen", "rejected"))
        good, bad = means
        assert numbers["validation/seen/rewards/margin"] == pytest.approx(good - bad)
    for of_step in (1, 2):  # one answer each
        kinds = {name.rpartition("/")[2] for name in found[of_step] if name.startswith("logps/")}
        assert len(kinds) == 1 and "rewards/margin" not in found[of_step]
    assert not (tmp_path / "run/best").exists()


def test_accuracy_of_answers_with_labels_is_no_metric(folder: Path, tmp_path: Path) -> None:
    """It was a KeyError after the first evaluation."""
    recipe = load_recipe("dpo_distributed")
    words = ["--config", f"{folder}/config.yaml", *LABELS, f"output_dir={tmp_path}/run"]
    with pytest.raises(UserError, match="held_out has labels, not pairs; expected held_out, held"):
        recipe.main(load_config(recipe.Config, words))


def faulty(answers: Answers, at: str) -> Loss:
    """A loss of a user's own that is NaN, or has such a gradient, once training has begun."""
    rewards = answers.ratios
    losses = answers.margins(rewards).square()
    if answers.logprobs.requires_grad and at == "loss":
        losses = losses * torch.nan
    elif answers.logprobs.requires_grad:
        losses = losses + (losses - losses.detach()).sqrt()  # the slope of a root is infinite at 0
    return losses, rewards


@pytest.mark.parametrize("at", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_is_named(folder: Path, tmp_path: Path, at: str) -> None:
    own = f"{{_component_: tests.training.test_preference_validation.faulty, at: {at}}}"
    words = ["batch_size=6", "validation={}", f"loss=[sigmoid,{own}]", f"output_dir={tmp_path}/run"]
    with pytest.raises(UserError) as error:
        train(folder, words)
    message, of = str(error.value), "" if at == "loss" else "gradient of "
    assert message.startswith("step 1: ") and "\n" not in message
    name = "'tests.training.test_preference_validation.faulty'"
    assert f"; first not finite: {of}loss[1] {name}, rank 0, samples " in message


def test_a_rate_that_is_too_high_stops_the_run(folder: Path, tmp_path: Path) -> None:
    words = ["batch_size=6", "validation={}", "optimizer.lr=1e30", f"output_dir={tmp_path}/run"]
    with pytest.raises(UserError) as error:
        train(folder, words)
    message = str(error.value)
    assert message.startswith("step 2: loss nan") and "; first not finite: weight model." in message
    assert "\n" not in message


def test_other_recipes_refuse_preferences(folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe()
    out = f"output_dir={tmp_path}/run"
    cfg = load_config(recipe.Config, ["--config", f"{folder}/config.yaml", "validation={}", out])
    recipe.check(cfg)
    with pytest.raises(
        UserError, match=r"^dataset: tests\S* has preferences; expected a dataset of"
    ):
        recipe.main(cfg)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dataset.labels=true"], "loss: 'qfsdp.training.preference_losses.sigmoid' needs pairs"),
        (["loss=kto"], "loss: 'qfsdp.training.preference_losses.kto' needs answers with labels"),
        (["validation.sets.seen.labels=true"], "validation.sets.seen: loss: "),
        (["reference_logprobs=cached"], "expected live, cache, or a folder with a /"),
        ([f"reference_logprobs={__file__}/x"], "expected a folder, not a file or a path in a file"),
        (["validation.metric=held_out/accuracy"], "expected held_out, seen, SET/rewards/accuracy"),
        (
            ["validation.sets.seen._component_=tests.toy_data.Samples"],
            "validation.sets.seen: tests.toy_data.Samples without preferences",
        ),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        train(folder, [f"output_dir={tmp_path}/run", *words])
    assert message in str(error.value) and "\n" not in str(error.value)
