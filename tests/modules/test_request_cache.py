"""Rows that come and go in one cache, against whole rows without a cache."""

from __future__ import annotations

import pytest
import torch

from qfsdp.modules.attention.kv_cache import KVCache
from qfsdp.modules.attention.request_cache import SLOTS, RequestCache
from qfsdp.modules.transformer import Decoder
from tests.modules.test_transformer import TINY, max_difference, ours, random_tokens, reference

CPU = torch.device("cpu")
# Step -> rows of `random_tokens` that begin, and their lengths; rows that end.
BEGIN = {0: [(0, 3)], 1: [(1, 11), (2, 1)], 4: [(3, 8)]}
END = {3: [0], 7: [2]}
STEPS = 12


def begin(decoder: Decoder, cache: RequestCache, prompt: list[int]) -> torch.Tensor:
    """The logits after the prompt."""
    alone = KVCache(decoder.config, [len(prompt)], 0, CPU)
    logits = decoder(torch.tensor([prompt]), cache=alone)
    cache.add(alone, STEPS)
    return logits[0]


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_logits_of_rows_that_come_and_go(name: str) -> None:
    decoder, tokens = ours(reference(name)), random_tokens(4)
    whole = decoder(tokens)
    cache = RequestCache(decoder.config, CPU)
    rows: list[int] = []
    seen: dict[int, int] = {}
    for step in range(STEPS):
        for row, length in BEGIN.get(step, []):
            logits = begin(decoder, cache, tokens[row, :length].tolist())
            assert max_difference(logits, whole[row, length - 1]) < 1e-4
            rows.append(row)
            seen[row] = length
        given = torch.stack([tokens[row, seen[row]] for row in rows]).unsqueeze(1)
        found = decoder(given, cache=cache)
        for row, logits in zip(rows, found, strict=True):
            assert max_difference(logits, whole[row, seen[row]]) < 1e-4, (step, row)
            seen[row] += 1
        for row in END.get(step, []):
            at = rows.index(row)
            cache.remove(at)
            rows[at] = rows[-1]
            rows.pop()
        assert len(cache) == len(rows)


@torch.no_grad()
def test_the_storage_grows_and_is_freed() -> None:
    decoder = ours(reference("llama3.1"))
    cache = RequestCache(decoder.config, CPU)
    for count in range(1, 6):
        begin(decoder, cache, list(range(1, 1 + count)))
        shape = cache._layers[0][0].shape
        assert shape[0] == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8}[count] and shape[2] == SLOTS
    alone = KVCache(decoder.config, [4], 0, CPU)
    decoder(torch.tensor([[1, 2, 3, 4]]), cache=alone)
    cache.add(alone, SLOTS)
    assert cache._layers[0][0].shape[2] == 2 * SLOTS
    while len(cache):
        cache.remove(0)
    assert cache._layers == []
    begin(decoder, cache, [1])
    assert len(cache) == 1
