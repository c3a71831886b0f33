"""Held-out loss: the mean over target tokens for any split, without effects on training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from qfsdp.common.errors import UserError
from qfsdp.data import PackedDataset
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.evaluation.heldout_loss import held_out_batches, held_out_loss
from qfsdp.evaluation.inference_model import evaluating
from qfsdp.evaluation.perplexity import (
    MeanLoss,
    TextConfig,
    TextWindows,
    dataset_loss,
    text_windows,
)
from qfsdp.evaluation.results import format_table, loss_results, write_results
from qfsdp.modules.adapters.config import AdapterConfig
from tests.models import adapted_model, cpu_world, load_model
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model
from tests.toy_data import Samples

pytestmark = pytest.mark.usefixtures("eager")

ADAPTER = AdapterConfig("dora", rank=3, dropout=0.5)


def plain_mean(folder: Path) -> tuple[float, int]:
    """Loss summed in fp64 over single samples, from whole logits, and the number of targets."""
    model, losses, count = load_model(folder), 0.0, 0
    for sample in (Samples(None, 11)[index] for index in range(11)):
        with torch.no_grad():
            logits = model(sample["tokens"][None])[0, :-1].double()
        targets = sample["labels"][1:]
        losses += F.cross_entropy(logits, targets, reduction="sum").item()
        count += int((targets != -100).sum())
    return losses, count


def losses_in_all_ways(folder: Path, sharding: dict[str, Any]) -> list[tuple[float, int]]:
    """Losses with batches of 1 and 4, of samples and packs. Runs on every rank."""
    world, found = cpu_world(), []
    model = load_model(folder, sharding=sharding)
    for dataset in (Samples(None, 11), PackedDataset(Samples(None, 11), 64, seed=0)):
        for batch_size in (1, 4):
            batches = held_out_batches(dataset, batch_size, world, pad_id=0, max_seq_len=64)
            found.append(held_out_loss(model, batches, world))
    return found


def train(folder: Path, evaluate: bool, sharding: dict[str, Any]) -> dict[str, Any]:
    """The weights after three updates, with or without evaluation after each."""
    world = cpu_world()
    model = adapted_model(folder, ADAPTER, sharding=sharding).train()
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=1e-3)
    batches = list(held_out_batches(Samples(None, 3 * world.size), 1, world, 0, 64))
    losses = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)  # dropout
        model(batch.tokens, labels=batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            held_out = held_out_batches(Samples(None, 5, seed=1), 2, world, 0, 64)
            losses.append(held_out_loss(model, held_out, world))
            assert all(module.training for module in model.modules())
            sharded = [isinstance(param, DTensor) for param in model.parameters()]
            assert all(sharded) == any(sharded) == (world.size > 1)
    assert len(set(losses)) == len(losses)  # each update changed the loss
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def both(
    folder: Path, sharding: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Losses and weights of a rank."""
    losses = losses_in_all_ways(folder, sharding)
    return losses, train(folder, True, sharding), train(folder, False, sharding)


@pytest.mark.parametrize(
    ("size", "sharding"),
    [(1, {}), (3, {"strategy": "shard_grad_op"}), pytest.param(2, {}, marks=pytest.mark.slow)],
    ids=["1", "3-shard_grad_op", "2"],
)
def test_loss_equals_single_samples_and_training_is_unchanged(
    tmp_path: Path, size: int, sharding: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    loss, count = plain_mean(folder)
    ranks = [both(folder, {})] if size == 1 else run_ranks(size, both, folder, sharding)
    for losses, looked, plain in ranks:
        assert [found for _, found in losses] == [count] * 4
        assert [found for found, _ in losses] == pytest.approx([loss] * 4, rel=1e-5)
        for name, weight in plain.items():
            assert weight.isfinite().all() and torch.equal(weight, looked[name]), name


def test_mode_comes_back_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(0.5)).train()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not model.training and not torch.is_grad_enabled()
        1 / 0  # noqa: B018
    assert model.training and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("size", "window", "stride"), [(10, 4, 4), (10, 4, 2), (11, 4, 3), (3, 4, 4), (4, 4, 1)]
)
def test_every_token_of_a_text_is_a_target_once(size: int, window: int, stride: int) -> None:
    windows = TextWindows(list(range(100, 100 + size)), window, stride)
    targets = []
    for index in range(len(windows)):
        item = windows[index]
        assert len(item["tokens"]) == len(item["labels"]) <= window
        shifted = item["labels"][1:]
        targets += shifted[shifted != -100].tolist()
    starts = set(range(0, size, window)) if stride == window else {0}
    assert targets == [100 + at for at in range(size) if at not in starts]
    with pytest.raises(IndexError):
        windows[len(windows)]


class Letters:
    """A tokenizer whose tokens are single characters."""

    pad_id, bos_id = 0, 1

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [1] * add_bos + [ord(c) for c in text] + [2] * add_eos


def test_text_files(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcdefgh")
    config = TextConfig(str(file), window=4, add_bos=True, max_tokens=6)
    assert text_windows("text.x", config, Letters())[0]["tokens"].tolist() == [1, 97, 98, 99]
    assert len(text_windows("text.x", config, Letters())) == 2
    with pytest.raises(UserError, match=r"^text.x.file: '/nowhere': No such file .* text file$"):
        text_windows("text.x", TextConfig("/nowhere"), Letters())
    file.write_text("a")
    with pytest.raises(UserError, match=r"has 1 tokens; expected at least two$"):
        text_windows("text.x", TextConfig(str(file)), Letters())


def test_perplexity_equals_transformers(smollm2_dir: Path, tmp_path: Path) -> None:
    """With overlapping windows, as in transformers' documentation for models of fixed length."""
    from transformers import AutoModelForCausalLM

    from qfsdp.data import hf_tokenizer

    file = tmp_path / "text.txt"
    file.write_text("Valkyria Chronicles is a role @-@ playing game . " * 3 + "It is 5,000 years.")
    windows = text_windows("text.x", TextConfig(str(file), 24, 16), hf_tokenizer(str(smollm2_dir)))
    assert len(windows) > 2
    world = cpu_world()
    found = dataset_loss(load_model(smollm2_dir, format="none"), windows, 2, world, 0, None)
    reference = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    total, tokens = 0.0, 0
    for index in range(len(windows)):
        item = windows[index]
        with torch.no_grad():
            mean = reference(item["tokens"][None], labels=item["labels"][None]).loss.item()
        count = int((item["labels"][1:] != -100).sum())
        total, tokens = total + mean * count, tokens + count
    assert found.tokens == tokens
    assert found.loss == pytest.approx(total / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert found.interval[0] < found.loss < found.interval[1]


def test_a_perplexity_beyond_all_numbers(tmp_path: Path) -> None:
    """Of a model that has diverged: the evaluation ends as any other."""
    found = loss_results("text", "x", MeanLoss(720.0, (700.0, 740.0), 9))
    assert found[1].value == math.inf and "perplexity  inf" in format_table(found)
    write_results(tmp_path / "x.json", found, {})
    loss, perplexity = json.loads((tmp_path / "x.json").read_text())["results"]
    assert loss["interval"] == [700.0, 740.0]
    assert perplexity["value"] is perplexity["interval"] is None


def test_a_set_without_targets(tmp_path: Path) -> None:
    class Nothing:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": [1, 2, 3], "labels": [-100] * 3}

    model = load_model(write_tiny_model(tmp_path / "model"))
    with pytest.raises(UserError, match=r"^loss.x: no target token in 2 samples; expected at"):
        dataset_loss(model, Nothing(), 2, cpu_world(), 0, None, title="loss.x")
