"""Adapters on experts through the recipes: all are trained and merged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qfsdp.checkpoint.adapter_files import PEFT_FIELDS, adapter_parameters
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import low_rank_linears
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.models import adapted_model, cpu_world
from tests.ranks import run_ranks
from tests.recipes.test_sharded_mixtures import MIXTURE
from tests.tiny import ROOT, load_recipe, run_in_turn, write_tiny_run
from tests.toy_data import TOY_CONFIG

pytestmark = pytest.mark.usefixtures("eager")
CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
batch_size: 6
epochs: 99
checkpoint: {{keep_last: 1}}
"""
)
MERGE = str(ROOT / "configs/merge.yaml")
UPDATES = 20
TOKENS = torch.randint(1, 577, (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("experts"), CONFIG, **MIXTURE)


train = partial(run_in_turn, "qdora_distributed")


def check_trained(folder: Path, run: Path, config: AdapterConfig) -> nn.Module:
    """Every adapter of a run is another than before training, that of each expert too. A model
    whose adapters get no gradient learns less, and its loss still falls. Returns the model."""
    start = adapter_parameters(adapted_model(folder / "model", config))
    loaded = (QuantizationConfig(), f"{run}/adapter", ShardingConfig(), cpu_world())
    trained = load_for_inference(ModelConfig(f"{folder}/model", dtype="fp32"), *loaded)
    moved = total = 0
    for name, module in low_rank_linears(trained):
        for field in ("lora_A", "lora_B", *(["magnitude"] if config.method == "dora" else [])):
            now = getattr(module, field)
            before = start[f"base_model.model.{name}.{PEFT_FIELDS[field]}"]
            before = before.repeat(len(now) // len(before), *[1] * (now.dim() - 1))  # shared ones
            count = getattr(module, "experts", 1)
            moved += int((now.view(count, -1) != before.view(count, -1)).any(1).sum())
            total += count
    assert moved == total > 0
    return trained


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(TOKENS)
    return out


@pytest.mark.parametrize(
    "method",
    [pytest.param("lora", marks=pytest.mark.slow), pytest.param("dora", marks=pytest.mark.long)],
)
def test_every_adapter_is_trained_and_merged(method: str, folder: Path) -> None:
    run = folder / method
    targets = ["all-linear", "gate"]  # routers too
    config = AdapterConfig(method, 4, 8.0, targets=targets, expert_rank=2)  # type: ignore[arg-type]
    words = [f"adapter={{method: {method}, rank: 4, alpha: 8, expert_rank: 2}}"]
    words += [f"adapter.targets=[{','.join(targets)}]"]
    train(folder, [*words, f"max_steps={UPDATES}", f"output_dir={run}"])
    trained = check_trained(folder, run, config)

    merge = load_recipe("merge")
    words = [f"model.path={folder}/model", "model.dtype=fp32", f"adapter={run}/adapter"]
    cfg = load_config(
        merge.Config, ["--config", MERGE, *words, f"output_dir={run}/m", "dtype=fp32"]
    )
    merge.check(cfg)
    merge.main(cfg)
    merged = ModelConfig(f"{run}/m", dtype="fp32")
    plain = (QuantizationConfig("none"), None, ShardingConfig(), cpu_world())
    found, expected = logits(load_for_inference(merged, *plain)), logits(trained)
    assert (found - expected).abs().max() < 1e-4
    theirs = AutoModelForCausalLM.from_pretrained(f"{run}/m", dtype=torch.float32)
    with torch.no_grad():
        assert (theirs.eval()(TOKENS).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("sharing", [None, "outer"])
def test_a_few_updates_reach_every_expert(sharing: Any, folder: Path) -> None:
    run = folder / f"sharing-{sharing}"
    words = ["adapter.rank=4", f"adapter.expert_sharing={sharing or 'null'}", "max_steps=3"]
    train(folder, [*words, f"output_dir={run}"])
    check_trained(folder, run, AdapterConfig("dora", 4, 8.0, expert_sharing=sharing))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_two_ranks_train_every_expert(parts: int, folder: Path) -> None:
    """Also where the experts are divided among the ranks."""
    run = folder / f"two-{parts}"
    words = ["adapter.rank=4", f"max_steps={UPDATES}", f"output_dir={run}"]
    run_ranks(2, train, folder, [*words, f"sharding.expert_parallel={parts}"])
    check_trained(folder, run, AdapterConfig("dora", 4, 8.0))
