"""Rotary embeddings that depend on a text's length: each document counts by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.log_likelihood import log_likelihoods
from qfsdp.modules.attention.document_lengths import document_lengths
from qfsdp.modules.transformer import Decoder
from qfsdp.training.preference import check_packed
from tests.modules.test_families import TINY, max_difference, ours, random_tokens, reference

CONTEXT = 26  # documents of 30 tokens are longer, those of 10 are not
NAMES = ["phi3-longrope", "llama-dynamic-longer"]
WORLD = World(torch.device("cpu"))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    model_type, keys = TINY["phi3-longrope"]
    changed = keys | {"original_max_position_embeddings": CONTEXT}
    monkeypatch.setitem(TINY, "phi3-longrope", (model_type, changed))
    return str(request.param)


def shifted(tokens: Tensor) -> Tensor:
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


@torch.no_grad()
def test_packed_documents_equal_transformers_on_each_alone(name: str) -> None:
    model, tokens = reference(name), random_tokens(1)
    alone = torch.cat([model(part).logits for part in tokens.split([30, 10], dim=1)], dim=1)
    bounds = torch.tensor([0, 30, 40, 40], dtype=torch.int32)
    positions = torch.cat([torch.arange(30), torch.arange(10)])[None]
    decoder = ours(model)
    assert max_difference(decoder(tokens, positions, cu_seqlens=bounds), alone) < 1e-4
    assert max_difference(decoder(tokens), alone) > 0.01


@torch.no_grad()
def test_the_loss_of_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    model, tokens = reference(name), random_tokens(2)
    decoder, short = ours(model), tokens[1:, :10]
    labels = shifted(tokens)
    labels[1, 9:] = -100
    padded = decoder(tokens, labels=labels)
    alone = F.cross_entropy(model(short).logits[0, :-1], short[0, 1:], reduction="sum")
    longer = decoder(tokens[:1], labels=labels[:1])
    assert abs(padded - alone - longer).item() < 1e-3
    assert abs(decoder(tokens[1:], labels=labels[1:]) - alone).item() < 1e-3


def test_choices_of_different_lengths_are_scored_as_each_alone(name: str) -> None:
    decoder, (row, _) = ours(reference(name)), random_tokens(2).tolist()
    pairs = [(row[:20], row[20:23]), (row[:20], row[20:36])]
    together = log_likelihoods(decoder, pairs, WORLD, 2)
    alone = [log_likelihoods(decoder, [pair], WORLD, 1)[0] for pair in pairs]
    for (a, _), (b, _) in zip(together, alone, strict=True):
        assert abs(a - b) < 1e-3


@pytest.mark.parametrize("name", NAMES[:1], indirect=True)
def test_prompts_of_different_lengths_are_answered_as_each_alone(name: str) -> None:
    decoder, tokens = ours(reference(name)), random_tokens(2)
    prompts, how = [tokens[0, :30].tolist(), tokens[1, :9].tolist()], SamplingConfig(8)
    found = generate(decoder, prompts, how, set(), WORLD)
    assert found == [generate(decoder, [prompt], how, set(), WORLD)[0] for prompt in prompts]


@pytest.mark.parametrize("name", NAMES[:1], indirect=True)
def test_an_answer_across_the_original_context_is_refused(name: str) -> None:
    decoder: Decoder = ours(reference(name))
    prompt = random_tokens(1)[0, :20].tolist()
    with pytest.raises(UserError, match="8 after 20 tokens .*at most 26 tokens together") as caught:
        generate(decoder, [prompt], SamplingConfig(8), set(), WORLD)
    assert "\n" not in str(caught.value)
    check_packed(True, CONTEXT, decoder.config)
    with pytest.raises(UserError, match=r"^packed: true, .*packed=false, or max_seq_len=26$"):
        check_packed(True, CONTEXT + 1, decoder.config)


def test_lengths_of_packed_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    bounds = torch.tensor([0, 3, 4, 5, 8, 8, 8], dtype=torch.int32)
    expected = [[3, 3, 3, 1], [1, 3, 3, 3]]
    assert document_lengths(positions, None, bounds).tolist() == expected
