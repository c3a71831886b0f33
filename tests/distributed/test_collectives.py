"""The collectives of a training step, all of them, on a fake group of four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from qfsdp.memory.estimate import estimate
from qfsdp.memory.tracker import MemoryTracker
from tests.memory.test_estimate import load
from tests.tiny import write_tiny_model

HIDDEN, VOCABULARY, LAYERS, RANKS = 192, 2048, 2, 4
TABLE = 2 * HIDDEN * VOCABULARY  # the embedding, and the output layer, in bf16
NORM = 2 * HIDDEN
LAYER = 434_432  # 4-bit rows, norms, and adapters in fp32
ADAPTERS = 224_000  # of a layer; "ddp" gathers them with their norms of 6,912 bytes
LINEARS = [45_120, 23_232, 23_232, 45_120, 99_840, 99_840, 97_280]  # q, k, v, o, gate, up, down
NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce", "allreduce_": "all"}

Collective = tuple[str, str, torch.dtype, int]


def gathers(phase: str, *sizes: int, dtype: torch.dtype = torch.uint8) -> list[Collective]:
    plain = {TABLE, NORM, 2 * NORM}
    return [(phase, "gather", torch.bfloat16 if s in plain else dtype, s) for s in sizes]


FORWARD = gathers("forward", NORM, TABLE, LAYER, LAYER, TABLE)
BACKWARD = gathers("backward", LAYER, LAYER)  # and not the embedding, which is frozen
DDP = gathers("forward", *[ADAPTERS + 6_912] * LAYERS, dtype=torch.float32)
BY_LINEAR = (
    gathers("forward", NORM, TABLE, *LAYERS * [2 * NORM, *LINEARS], TABLE),
    gathers("backward", *LAYERS * [2 * NORM, *reversed(LINEARS)]),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collectives")
    return write_tiny_model(folder / "model", vocab_size=VOCABULARY, intermediate_size=512)


def collectives(model: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Collective]:
    """Phase, kind, dtype and bytes of the larger side, in order, of one micro-batch's step."""
    seen = []

    def record(tracker: MemoryTracker, func: Any, args: Any) -> None:
        if (name := NAMES.get(func._opname)) is not None:
            tensors = [leaf for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor)]
            whole = max(tensors, key=lambda tensor: tensor.nbytes)
            seen.append((tracker.phase, name, whole.dtype, whole.nbytes))

    monkeypatch.setattr(MemoryTracker, "_count_wire", record)
    words = ("model.dtype=bf16", "gradient_accumulation_steps=1", *words)
    estimate(*load(model, *words), RANKS)
    return seen


@pytest.mark.parametrize(
    ("words", "forward", "backward"),
    [
        (["full_shard"], FORWARD, BACKWARD),
        (["full_shard", "sharding.prefetch=0"], FORWARD, BACKWARD),
        (["full_shard", "sharding.prefetch=2"], FORWARD, BACKWARD),
        (["full_shard", "sharding.wrap=linear"], *BY_LINEAR),
        (["shard_grad_op"], FORWARD, []),
        (["ddp"], DDP, []),
        (["hybrid_full_shard", "sharding.shard=2"], FORWARD, BACKWARD),
        (["hybrid_shard_grad_op", "sharding.shard=2"], FORWARD, []),
    ],
)
def test_nothing_is_gathered_that_backward_does_not_use(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    forward: list[Collective],
    backward: list[Collective],
) -> None:
    strategy, *others = words
    found = collectives(model, monkeypatch, f"sharding.strategy={strategy}", *others)
    gathered = [one for one in found if one[1] == "gather" and one[0] != "norm_refresh"]
    assert [one for one in gathered if one[0] == "forward"] == forward
    assert [one for one in gathered if one[0] == "backward"] == backward
    assert len(gathered) == len(forward) + len(backward)
    reduced = [size for phase, kind, _, size in found if (phase, kind) == ("backward", "reduce")]
    assert sum(reduced) == LAYERS * ADAPTERS
    # Target tokens before forward; the squared norm with the loss after backward.
    sums = [(dtype, size) for phase, kind, dtype, size in found if kind == "all" and size <= 16]
    assert sums == [(torch.float64, 8), (torch.float64, 16)]


def test_what_lies_before_the_first_trained_linear_is_gathered_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward ends at the down_proj of the first layer. Its other linears need no gradient."""
    words = ["sharding.strategy=full_shard", "sharding.wrap=linear", "adapter.targets=[down_proj]"]
    found = collectives(model, monkeypatch, *words)
    units = LAYERS * (1 + len(LINEARS)) - (len(LINEARS) - 1)
    assert sum(one[:2] == ("backward", "gather") for one in found) == units
