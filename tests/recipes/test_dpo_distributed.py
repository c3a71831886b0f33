"""Preference tuning: the same numbers on any number of ranks, for every split, padded or packed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.preferences import Sample, preference_batch, random_samples
from tests.ranks import run_ranks
from tests.tiny import load_recipe, recipe_config, write_tiny_model

PAIRS, STEPS, TOLERANCE = 6, 4, 1e-5


def step_batches(
    step: int, rank: int, size: int, case: dict[str, Any], samples: list[Sample]
) -> list[Any]:
    """This rank's micro-batches of an update: `case["micro"]` of them, of whole pairs."""
    chosen = [at for at in range(PAIRS) if at % (size * case["micro"]) % size == rank]
    batches = []
    for micro in range(case["micro"]):
        pairs = [at for at in chosen if at % (size * case["micro"]) // size == micro]
        mine = [samples[2 * (step * PAIRS + at) + which] for at in pairs for which in (0, 1)]
        batches.append(preference_batch(mine, slots=case.get("slots")))
    return batches


def train(model_dir: Path, cases: list[dict[str, Any]], steps: int = STEPS) -> list[dict[str, Any]]:
    """Some updates for each case; runs on every rank."""
    recipe = load_recipe("dpo_distributed")
    from qfsdp.checkpoint.adapter_files import adapter_parameters
    from qfsdp.config.component import Component
    from qfsdp.distributed.gradients import trainable_parameters
    from qfsdp.distributed.strategy import ShardingConfig
    from qfsdp.distributed.world import init_world
    from qfsdp.modules.adapters.config import AdapterConfig
    from qfsdp.modules.decoder_base import base_parameters
    from qfsdp.modules.transformer import ActivationConfig
    from qfsdp.tensor_subclasses.dtensor import local_part, whole_tensor
    from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
    from qfsdp.training.optimizer import build_optimizer
    from qfsdp.training.preference import Objective
    from qfsdp.training.steps import StepClock

    samples, results = random_samples(2 * PAIRS * steps), []
    for case in cases:
        sharding = ShardingConfig(wrap=case.get("wrap", "decoder_layer"))
        world = init_world(sharding)
        cfg = recipe_config(
            recipe,
            model_dir,
            loss=case.get("loss", Component("sigmoid")),
            reference=case.get("reference", "base"),
            quantization=recipe.QuantizationConfig("nf4", ["all-linear", "lm_head"]),
            adapter=AdapterConfig(
                case["method"],
                rank=5,
                alpha=7.0,
                targets=case.get("targets", "all-linear"),
                start_from=case.get("start_from"),
            ),
            sharding=sharding,
            activation=ActivationConfig(case.get("checkpointing", "none")),
        )
        model = recipe.load_model(cfg, world)
        adamw = {"lr": 1e-3, "eps": 1e-6, "fused": True}
        trained = trainable_parameters(model)
        optimizer = build_optimizer(Component("torch.optim.AdamW", adamw), trained)
        objective = Objective(cfg.loss, cfg.reference)

        def base_bytes(model: Any = model) -> list[bytes]:
            locals_ = [local_part(param) for _, param in base_parameters(model)]
            plain = [p.qdata if isinstance(p, QuantizedTensor) else p for p in locals_]
            return [p.detach().numpy().tobytes() for p in plain]

        before, history = base_bytes(), []
        for step in range(steps):
            batches = step_batches(step, world.rank, world.size, case, samples)
            clock = StepClock(world.device)
            history.append(
                recipe.train_step(model, optimizer, None, batches, 1.0, world, clock, objective)
            )
        adapters = {name: whole_tensor(p) for name, p in adapter_parameters(model).items()}
        results.append(
            {"history": history, "adapters": adapters, "base_kept": before == base_bytes()}
        )
    return results


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for mine, theirs in zip(result["history"], expected["history"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=TOLERANCE)
    for name, value in result["adapters"].items():
        torch.testing.assert_close(value, expected["adapters"][name], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(model_dir: Path) -> dict[str, dict[str, Any]]:
    """One process, one padded micro-batch."""
    cases = [{"method": method, "micro": 1} for method in ("lora", "dora")]
    results = run_ranks(1, train, model_dir, cases)[0]
    return {case["method"]: result for case, result in zip(cases, results, strict=True)}


def test_the_first_loss_is_ln_2_and_the_base_stays(whole: dict[str, dict[str, Any]]) -> None:
    for result in whole.values():
        first = result["history"][0]
        assert first["loss"] == torch.tensor(2.0).log().item()
        assert first["rewards/chosen"] == first["rewards/margin"] == first["kl"] == 0.0
        assert result["history"][1]["loss"] != first["loss"] and result["base_kept"]
        assert math.isfinite(first["grad_norm"]) and first["grad_norm"] > 0
    assert whole["lora"]["history"] != whole["dora"]["history"]


@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_same_for_ranks_and_splits(
    size: int, model_dir: Path, whole: dict[str, dict[str, Any]]
) -> None:
    cases: list[dict[str, Any]] = [
        {"method": "lora", "micro": 2},
        {"method": "dora", "micro": 1, "slots": 64},
        {"method": "dora", "micro": 4, "wrap": "linear", "checkpointing": "full"},
    ]
    by_rank = run_ranks(size, train, model_dir, cases)
    for results in by_rank:
        for case, result in zip(cases, results, strict=True):
            assert_same(result, whole[case["method"]])
            assert result["history"][0]["loss"] == torch.tensor(2.0).log().item()


@pytest.mark.slow
def test_the_base_stays_for_50_updates(model_dir: Path) -> None:
    cases = [{"method": method, "micro": 1} for method in ("lora", "dora")]
    for result in run_ranks(1, train, model_dir, cases, 50)[0]:
        history = result["history"]
        assert len(history) == 50 and result["base_kept"]
        assert len({metrics["loss"] for metrics in history}) == 50
