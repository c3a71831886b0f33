"""Steps on an accelerator: none waits for it inside, and replayed ones equal those of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.data.loader import collate
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.training.cuda_graphs import WARM_UP, StepGraphs
from qfsdp.training.steps import StepClock
from tests.models import build_meta_model, randomize_adapters
from tests.on_gpu import GPU, IS_CUDA, needs_gpu
from tests.tiny import DELTA, load_recipe, write_tiny_model
from tests.training.test_cuda_graphs import StandIn

pytestmark = needs_gpu
STEPS = WARM_UP + 4
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3_5": DELTA}


def train(folder: Path, method: Any, graphs: bool, after_warm_up: Any) -> list[dict[str, float]]:
    config = AdapterConfig(method, rank=4)
    model = build_meta_model(folder, adapter=config, dtype="bf16")
    load_base(model, ModelWeights(folder), GPU)
    init_adapters(model, seed=0)
    randomize_adapters(model)
    model.train()
    world, clock, recipe = World(GPU), StepClock(GPU), load_recipe("qdora_distributed")
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-3, fused=True)
    device: Any = None if IS_CUDA else StandIn(model)
    captured = StepGraphs(model, True, None, world, device) if graphs else None
    metrics = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 500, (64,), generator=generator)
        row = {"tokens": tokens, "labels": tokens.clone(), "lengths": [20 + step, 44 - step]}
        row["labels"][: 3 + step] = -100
        batches = [collate([row, row], pad_id=0, max_seq_len=64)] * 2
        if step == WARM_UP + 2:
            after_warm_up()
        args = (model, optimizer, None, batches, 1.0, world, clock, captured)
        metrics.append(recipe.train_step(*args))
    return metrics


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("method", "family"), [("lora", "llama"), ("dora", "llama"), ("dora", "qwen3_5")]
)
def test_the_host_does_not_wait_inside_a_step(
    tmp_path: Path, method: str, family: str, graphs: bool
) -> None:
    """Not where PyTorch knows of it; an event, for which an update waits last, is no such place."""
    folder = write_tiny_model(tmp_path / "model", **FAMILIES[family])
    watch = torch.cuda.set_sync_debug_mode if IS_CUDA else str
    try:
        train(folder, method, graphs, lambda: watch("error"))
    finally:
        watch("default")


@pytest.mark.parametrize(
    ("method", "family"), [("lora", "llama"), ("dora", "llama"), ("dora", "qwen3_5")]
)
def test_replayed_steps_are_steps(
    tmp_path: Path, method: str, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Recurrent layers too."""
    folder = write_tiny_model(tmp_path / "model", **FAMILIES[family])
    expected = train(folder, method, False, lambda: None)
    found = train(folder, method, True, lambda: None)
    assert "not used" not in capfd.readouterr().err
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-2)
