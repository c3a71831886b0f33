"""The same losses and adapters on 1, 2, 3, 4 ranks and for every split of the batch.

All of it through the recipe's own functions, in fp32, on a model with 577-row weights.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.tiny import load_recipe, write_tiny_model

STEPS = 5
TOLERANCE = 1e-5


class Samples:
    """26 random samples of 5 to 60 tokens, about half of them targets."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(5, 60, (1,), generator=generator))
        tokens = torch.randint(0, 577, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 2] = -100
        return {"tokens": tokens, "labels": labels}


def train(model_dir: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Five updates for each case; runs on every rank."""
    recipe = load_recipe()
    from qfsdp.checkpoint.export import adapter_parameters
    from qfsdp.data import StepLoader
    from qfsdp.distributed import ShardingConfig, init_world, packed_bytes
    from qfsdp.modules.adapters import AdapterConfig
    from qfsdp.modules.packed_linear import QuantizationConfig
    from qfsdp.modules.transformer import ActivationConfig

    world = init_world()
    results = []
    for case in cases:
        cfg = recipe.Config(
            output_dir="unused",
            model=recipe.ModelConfig(str(model_dir), dtype=case.get("dtype", "fp32")),
            tokenizer=None,
            dataset=None,
            optimizer=None,
            quantization=QuantizationConfig(
                case.get("format", "nf4"), case.get("packed", ["all-linear", "lm_head"])
            ),
            adapter=AdapterConfig(
                case["method"], rank=5, alpha=7.0, targets=["all-linear", "lm_head"]
            ),
            sharding=ShardingConfig(
                wrap=case["wrap"], reshard_after_forward=case.get("reshard", True)
            ),
            activation=ActivationConfig(case.get("checkpointing", "none")),
            compile=case.get("compile", False),
        )
        model = recipe.load_model(cfg, world)
        optimizer = torch.optim.AdamW(recipe.trainable_parameters(model), lr=5e-3, fused=True)
        batch_size, accumulation = case["split"]
        loader = StepLoader(
            Samples(),
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            rank=world.rank,
            world_size=world.size,
            seed=3,
            pad_id=0,
            max_seq_len=64,
        )
        history = [
            recipe.train_step(model, optimizer, None, loader.step(step), 1.0, world)
            for step in range(STEPS)
        ]
        adapters = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
            for name, p in adapter_parameters(model).items()
        }
        results.append(
            {
                "losses": [h["loss"] for h in history],
                "grad_norms": [h["grad_norm"] for h in history],
                "adapters": adapters,
                "packed_bytes": packed_bytes(model),
            }
        )
    return results


def assert_same(result: dict[str, Any], reference: dict[str, Any], what: str) -> None:
    losses = torch.tensor([result["losses"], reference["losses"]])
    assert (losses[0] - losses[1]).abs().max() < TOLERANCE, f"{what}: {losses}"
    assert result["adapters"].keys() == reference["adapters"].keys()
    for name, value in result["adapters"].items():
        difference = (value - reference["adapters"][name]).abs().max()
        assert difference < TOLERANCE, f"{what}: {name} differs by {difference:.2e}"


METHODS = ("lora", "dora")
WRAPS = ("decoder_layer", "linear")
# Global batch 12, so that 1, 2, 3 and 4 ranks divide it.
SPLITS = {1: [(12, 1), (3, 4)], 2: [(6, 1), (2, 3)], 3: [(4, 1), (1, 4)], 4: [(3, 1), (1, 3)]}


def cases_for(size: int) -> list[dict[str, Any]]:
    return [
        {"method": method, "wrap": wrap, "split": split}
        for method, wrap, split in itertools.product(METHODS, WRAPS, SPLITS[size])
    ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), shards=3)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> dict[str, dict[str, Any]]:
    """One process, one micro-batch."""
    cases = [{"method": m, "wrap": "decoder_layer", "split": (12, 1)} for m in METHODS]
    return dict(zip(METHODS, run_ranks(1, train, model_dir, cases)[0], strict=True))


def test_training_does_something(reference: dict[str, dict[str, Any]]) -> None:
    for method, result in reference.items():
        assert result["losses"][-1] < result["losses"][0] - 0.05, (method, result["losses"])
    assert reference["lora"]["losses"][0] == pytest.approx(reference["dora"]["losses"][0], 1e-6)
    assert reference["lora"]["losses"][-1] != reference["dora"]["losses"][-1]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_same_for_every_world_size_wrap_and_split(
    size: int, model_dir: Path, reference: dict[str, dict[str, Any]]
) -> None:
    cases = cases_for(size)
    by_rank = run_ranks(size, train, model_dir, cases)
    for at, case in enumerate(cases):
        for rank in range(size):
            what = f"{size} ranks, rank {rank}, {case}"
            assert_same(by_rank[rank][at], reference[case["method"]], what)
    whole = reference["lora"]["packed_bytes"]
    held = [result[0]["packed_bytes"] for result in by_rank]
    print(f"packed bytes on {size} ranks: {held}, of {whole}")
    assert sum(held) == whole
    # Uneven rows: the first ranks hold ceil(rows / size) of each weight, at most one row more.
    assert max(held) <= whole / size + 15 * 400
