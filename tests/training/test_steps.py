"""The functions of own training loops: per-token log-probabilities, draws, batches, updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.data import collate
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.evaluation.generation import SamplingConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.tensor_subclasses.dtensor import whole_tensor
from qfsdp.training.rollouts import Answer, micro_batches, per_row, sample, token_logprobs
from qfsdp.training.steps import forward_backward, optim_step
from tests.models import adapted_model, cpu_world, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
STOPS = set(range(480, 577))  # a sixth of all tokens: some answers end, some are cut


class Words:
    pad_id = 0

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def model_of(folder: Path) -> Any:
    model = adapted_model(folder, AdapterConfig("dora", rank=4))
    randomize_adapters(model)
    return model.train()


def loop(folder: Path) -> dict[str, Any]:
    """Two updates on drawn answers, as a user writes them."""
    world, model = cpu_world(), model_of(folder)
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=0.1)
    drawn, metrics = [], []
    for seed in range(2):
        sampling = SamplingConfig(6, temperature=1.0, seed=seed)
        groups = sample(model, Words(), PROMPTS, STOPS, world, k=3, sampling=sampling, batch_size=4)
        drawn.append([[answer.tokens for answer in group] for group in groups])
        rows = [answer.row() for group in groups for answer in group]
        values = [(-1.0) ** index * (1 + index) for index in range(len(rows))]
        batches = micro_batches(rows, world, batch_size=2, pad_id=0)

        def loss_of(batch: Any, values: list[float] = values) -> torch.Tensor:
            return -(per_row(values, batch) * token_logprobs(model, batch).sum(1)).sum() / 9

        loss = forward_backward(loss_of, batches, optimizer, world)
        metrics.append(optim_step(model, optimizer, loss, world, clip=1.0))
    weights = [whole_tensor(param).clone() for param in trainable_parameters(model)]
    return {"drawn": drawn, "metrics": metrics, "weights": weights, "training": model.training}


@pytest.fixture(scope="module")
def of_one(folder: Path) -> dict[str, Any]:
    return run_ranks(1, loop, folder)[0]  # uncompiled


def test_answers_are_rows(folder: Path, of_one: dict[str, Any]) -> None:
    assert of_one["training"]
    tokens = [answer for group in of_one["drawn"][0] for answer in group]
    assert len({tuple(answer) for answer in tokens}) > 5  # draws of a prompt differ
    ended = [answer[-1] in STOPS for answer in tokens]
    assert any(ended) and not all(ended)
    assert all(len(a) == 6 for a, end in zip(tokens, ended, strict=True) if not end)
    assert not any(token in STOPS for answer in tokens for token in answer[:-1])
    row = Answer([1, 2], [3, 4], "3", True).row()
    assert row == {"tokens": [1, 2, 3, 4], "labels": [IGNORE_INDEX] * 2 + [3, 4]}


def test_two_ranks_draw_and_train_as_one(folder: Path, of_one: dict[str, Any]) -> None:
    first, second = run_ranks(2, loop, folder)
    assert first["drawn"] == second["drawn"] == of_one["drawn"]
    assert first["metrics"] == second["metrics"]
    for mine, theirs in zip(of_one["metrics"], first["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for one, two in zip(of_one["weights"], first["weights"], strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-5)


def test_token_logprobs_are_those_of_whole_logits(folder: Path) -> None:
    run_ranks(1, compare_with_whole_logits, folder)


def compare_with_whole_logits(folder: Path) -> None:
    model = model_of(folder)
    samples = [{"tokens": list(range(1, n)), "labels": list(range(1, n))} for n in (9, 6)]
    samples[0]["labels"][:3] = [IGNORE_INDEX] * 3
    batch = collate(samples, pad_id=0)
    weights = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    trained = trainable_parameters(model)

    found = token_logprobs(model, batch)
    gradients = torch.autograd.grad((found * weights).sum(), trained)
    logits = model(batch.tokens).float().log_softmax(-1)
    targets = batch.labels.clamp(min=0).unsqueeze(-1)
    dense = logits.gather(-1, targets).squeeze(-1) * (batch.labels != IGNORE_INDEX)
    expected = torch.autograd.grad((dense * weights).sum(), trained)

    torch.testing.assert_close(found, dense, rtol=0, atol=1e-5)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_nothing_is_updated_by_nan(folder: Path) -> None:
    run_ranks(1, update_with_nan, folder)


def update_with_nan(folder: Path) -> None:
    world, model = cpu_world(), model_of(folder)
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=0.1)
    before = [param.detach().clone() for param in trainable_parameters(model)]
    batches = micro_batches([Answer([1], [2, 3], "", True).row()], world, batch_size=1, pad_id=0)
    loss = forward_backward(
        lambda batch: token_logprobs(model, batch).sum() * torch.nan, batches, optimizer, world
    )
    metrics = optim_step(model, optimizer, loss, world)
    assert metrics["loss"] != metrics["loss"]
    for old, new in zip(before, trainable_parameters(model), strict=True):
        assert torch.equal(old, new) and new.grad is None
