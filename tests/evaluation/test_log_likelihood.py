"""Log-likelihoods of continuations in shared rows equal transformers', one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qfsdp.evaluation.log_likelihood import Likelihood, log_likelihoods
from tests import hub_models
from tests.models import cpu_world, load_model
from tests.modules import test_families as families
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 9,
    },
    "tied": {"tie_word_embeddings": True, "max_position_embeddings": 32},
}
SINKS = "gpt-oss-default"  # its attention takes no mask
HUB = "of transformers"  # nor do these models; one with recurrent layers


def pairs() -> list[tuple[list[int], list[int]]]:
    """Contexts of 1 to 40 tokens (one model has 32 positions) with several continuations.

    Continuations have one or many tokens, are prefixes of each other, occur twice, or are empty.
    """
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, 577, (count,), generator=draw).tolist()

    found = []
    for length in (1, 5, 12, 30, 40):
        context, stem = tokens(length), tokens(3)
        choices = [tokens(1), tokens(1), stem, [*stem, *tokens(2)], tokens(8)]
        found += [(context, choice) for choice in choices]
    return [*found, found[3], (found[0][0], []), found[12], ([7], tokens(40))]


def score(folder: Path, batch_size: int) -> list[Likelihood]:
    hub = "qwen3_5" in (folder / "config.json").read_text()
    model = hub_models.built(folder) if hub else load_model(folder, format="none")
    return log_likelihoods(model, pairs(), cpu_world(), batch_size)


@torch.no_grad()
def by_transformers(folder: Path) -> list[Likelihood]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    positions = model.config.max_position_embeddings
    found = []
    for context, continuation in pairs():
        if not continuation:
            found.append((0.0, True))
            continue
        tokens = torch.tensor([*context, *continuation])[-(positions + 1) :]
        numbers = model(tokens[None, :-1]).logits[0].log_softmax(-1)
        count = min(len(continuation), len(tokens) - 1)
        numbers, targets = numbers[len(numbers) - count :], tokens[len(tokens) - count :]
        value = numbers.gather(1, targets[:, None]).sum().item()
        found.append((value, bool((numbers.argmax(-1) == targets).all())))
    return found


@pytest.mark.parametrize("family", [*FAMILIES, SINKS, pytest.param(HUB, marks=pytest.mark.long)])
def test_values_equal_transformers(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    if family == HUB:
        hub_models.save_hub_model("qwen3_5", folder)
    elif family == SINKS:
        monkeypatch.setitem(families.SIZES, "vocab_size", 577)
        families.reference(family).save_pretrained(folder)
    else:
        write_tiny_model(folder, **FAMILIES[family])
    expected = by_transformers(folder)
    for batch_size in (1, 3):
        found = score(folder, batch_size)
        assert [hit for _, hit in found] == [hit for _, hit in expected]
        values = [value for value, _ in found]
        assert values == pytest.approx([value for value, _ in expected], abs=2e-4)


def test_greedy_continuations_are_recognized(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "model"), format="none")
    context = tokens = [3, 1, 4]
    for _ in range(5):
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    best, other = tokens[3:], [*tokens[3:7], tokens[7] ^ 1]
    scores = log_likelihoods(model, [(context, best), (context, other)], cpu_world(), 4)
    assert [hit for _, hit in scores] == [True, False] and scores[0] > scores[1]


def test_choices_share_their_context(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "model"), format="none")
    context = list(range(1, 101))
    questions = [(context, [200 + n, 300, 301]) for n in range(8)] + [(context, [400])]
    run: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: run.append(args[0].numel()))
    scores = log_likelihoods(model, questions * 2, cpu_world(), 4)
    assert run == [100 + 8 * 2] and scores[:9] == scores[9:]


@pytest.mark.long
def test_ranks_give_the_values_of_one_process(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    alone = score(folder, 2)
    ranks = run_ranks(3, score, folder, 2)
    assert all(of_rank == ranks[0] for of_rank in ranks)
    assert [hit for _, hit in ranks[0]] == [hit for _, hit in alone]
    values = [value for value, _ in alone]
    assert [value for value, _ in ranks[0]] == pytest.approx(values, abs=1e-4)
