"""The decoder with a cache of keys and values, against itself without one and `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from qfsdp.distributed.world import World
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.attention import kv_cache
from qfsdp.modules.attention.kv_cache import KVCache
from qfsdp.modules.transformer import Decoder
from tests.modules.test_transformer import SEQ, TINY, max_difference, ours, random_tokens, reference
from tests.tiny import needs_compiler

CPU = torch.device("cpu")
LENGTHS = [3, 11, 8, 1]  # two within a window of 7, two not
FIRST, NEW = max(LENGTHS), 14


def step_by_step(decoder: Decoder, tokens: Tensor, drop_at: int = NEW) -> Tensor:
    """Logits `[4, NEW, vocab]` after the first `LENGTHS` tokens of each row and after each later
    token. Row 1 is dropped at step `drop_at`; its logits are zeros from there on."""
    cache = KVCache(decoder.config, LENGTHS, NEW, CPU)
    prompts = torch.randint_like(tokens[:, :FIRST], decoder.config.vocab_size)  # also as padding
    for row, length in enumerate(LENGTHS):
        prompts[row, :length] = tokens[row, :length]
    logits, rows = torch.zeros(4, NEW, decoder.config.vocab_size), [0, 1, 2, 3]
    given = prompts
    for step in range(NEW):
        logits[rows, step] = decoder(given, cache=cache).float()
        if step == drop_at:
            cache.keep([0, 2, 3])
            rows.remove(1)
        given = torch.stack([tokens[row, LENGTHS[row] + step] for row in rows]).unsqueeze(1)
    return logits


def expected_logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    """The same logits from one pass over whole rows."""
    whole = decoder(tokens).float()
    return torch.stack([whole[row, n - 1 : n - 1 + NEW] for row, n in enumerate(LENGTHS)])


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_logits_equal_those_without_a_cache(name: str) -> None:
    decoder, tokens = ours(reference(name)), random_tokens(4)
    expected = expected_logits(decoder, tokens)
    assert expected.std() > 0.3
    assert max_difference(step_by_step(decoder, tokens), expected) < 1e-4
    dropped = step_by_step(decoder, tokens, drop_at=5)
    assert max_difference(dropped[[0, 2, 3]], expected[[0, 2, 3]]) < 1e-4
    assert max_difference(dropped[1, :6], expected[1, :6]) < 1e-4


@pytest.mark.parametrize("name", ["llama3.1", "mistral-window"])
@torch.no_grad()
def test_bf16_is_as_near_to_fp32_as_without_a_cache(name: str) -> None:
    decoder, tokens = ours(reference(name)), random_tokens(4)
    exact = expected_logits(decoder, tokens)
    decoder.bfloat16()
    without = (expected_logits(decoder, tokens) - exact).abs().mean()
    assert 0 < (step_by_step(decoder, tokens) - exact).abs().mean() < 1.2 * without


@torch.no_grad()
def test_the_window_is_looked_at() -> None:
    """Far tokens matter without a window, and do not with a window of 7."""
    tokens = random_tokens(4)
    changed = tokens.clone()
    changed[1, 0] = (changed[1, 0] + 1) % 101
    for changes, differs in (({}, False), ({"window": None}, True)):
        decoder = ours(reference("mistral-window"), **changes)
        last = [step_by_step(decoder, t)[1, -1] for t in (tokens, changed)]
        # Three layers of windows reach 19 tokens back; row 1 is at token 24 by then.
        assert (max_difference(*last) > 1e-3) == differs


def test_attention_sees_few_numbers_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's attention library plans anew for each number of keys."""
    monkeypatch.setattr(kv_cache, "SEEN_STEP", 8)
    decoder = ours(reference("llama3.1"))
    cache = KVCache(decoder.config, LENGTHS, NEW, CPU)
    widths = []
    for _ in range(NEW):
        cache.advance()
        widths.append(cache.mask().shape[3])
        assert (cache.mask()[:, 0, 0].sum(1) == cache.lengths + 1).all()
    assert sorted({*widths}) == [16, 24, FIRST + NEW]


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_match_transformers(name: str) -> None:
    model, tokens = reference(name), random_tokens(4)
    model.generation_config.eos_token_id = None
    prompts = [tokens[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    found = generate(ours(model), prompts, SamplingConfig(max_new_tokens=NEW), set(), World(CPU))
    for prompt, answer in zip(prompts, found, strict=True):
        given: Any = torch.tensor([prompt])
        whole = model.generate(given, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        assert whole[0, len(prompt) :].tolist() == answer
    assert SEQ > FIRST + NEW


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
def test_compiled_steps_are_the_same() -> None:
    decoder, tokens = ours(reference("mistral-window")), random_tokens(4)
    expected = step_by_step(decoder, tokens)
    decoder.compile_layers()
    torch._dynamo.reset()
    assert (
        max_difference(step_by_step(decoder, tokens, drop_at=5)[[0, 2, 3]], expected[[0, 2, 3]])
        < 1e-4
    )


@needs_compiler
@pytest.mark.parametrize("method", ["lora", "dora"])
@torch.no_grad()
def test_prompts_are_not_compiled(method: str) -> None:
    """A build for one call, whichever part of a layer is compiled."""
    decoder, tokens = ours(reference("mistral-window")), random_tokens(4)
    add_adapters(decoder, AdapterConfig(method, 4))
    init_adapters(decoder, seed=0)
    expected = decoder(tokens[:, :FIRST], cache=KVCache(decoder.config, [FIRST] * 4, NEW, CPU))
    decoder.compile_layers()
    counters.clear()
    found = decoder(tokens[:, :FIRST], cache=KVCache(decoder.config, [FIRST] * 4, NEW, CPU))
    assert counters["stats"]["unique_graphs"] == 0
    assert torch.equal(found, expected)
