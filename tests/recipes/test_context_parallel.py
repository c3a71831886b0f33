"""Ranks that share rows (`sharding.context_parallel`) train what ranks with whole rows train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.recipes.test_sharded_equals_unsharded import assert_same, train
from tests.tiny import write_tiny_model

# A row has 64 tokens; two ranks have 32 each, three have 22.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "window of 9": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "window of 40, and none": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "sinks, experts": {
        "architectures": ["GptOssForCausalLM"],
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "head_dim": 32,
        "sliding_window": 9,
    },
}


def compare(folder: Path, size: int, parts: int, cases: list[dict[str, Any]]) -> None:
    """Ten updates of every case on `size` ranks, `parts` of which share rows, and on one rank with
    as many rows per update."""
    given = {"wrap": "decoder_layer", "quantized": "all-linear", "adapted": "all-linear"}
    given |= {"steps": 10, "method": "dora"}
    cases = [given | case for case in cases]
    alone = [case | {"split": (12, 1)} for case in cases]
    split = {"split": (12 * parts // size // 2, 2), "sharding": {"context_parallel": parts}}
    one = run_ranks(1, train, folder, alone)[0]
    several = run_ranks(size, train, folder, [case | split for case in cases])
    for rank, results in enumerate(several):
        for case, result, reference in zip(cases, results, one, strict=True):
            assert_same(result, reference, f"rank {rank} of {size} in {parts}s: {case}")


def test_packed_rows_on_two_ranks(tmp_path: Path) -> None:
    compare(write_tiny_model(tmp_path), 2, 2, [{"packs": True}])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "parts"),
    [
        ("llama", 3, 3),
        ("llama", 4, 2),
        ("window of 9", 3, 3),
        ("window of 40, and none", 3, 3),
        ("sinks, experts", 2, 2),
    ],
)
def test_ten_updates_are_those_of_one_rank(
    name: str, size: int, parts: int, tmp_path: Path
) -> None:
    """Samples in rows, among them a rank whose part is all padding; and packed, cut documents."""
    folder = write_tiny_model(tmp_path, **MODELS[name])
    compare(folder, size, parts, [{}, {"packs": True, "method": "lora"}])
