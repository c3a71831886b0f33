"""Adapters on experts through the recipes: all are trained, merged, and watched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qfsdp.checkpoint.adapter_files import PEFT_FIELDS, adapter_parameters
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import LowRankExpertLinear, low_rank_linears
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows
from qfsdp.training import gradient_watch
from qfsdp.training.gradient_watch import UPDATES
from tests.models import adapted_model, cpu_world
from tests.ranks import run_ranks
from tests.recipes.test_sharded_mixtures import MIXTURE
from tests.tiny import ROOT, load_recipe, write_tiny_model
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
TOKENS = torch.randint(1, 577, (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_tiny_model(folder / "model", **MIXTURE)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def train(folder: Path, words: list[str], broken: tuple[str, int] | None = None) -> str:
    """Runs the recipe; returns its message if it ends with an error. Runs on every rank.

    Args:
        broken: an adapter and an expert whose gradients are lost.
    """
    recipe = load_recipe("qdora_distributed")
    load = recipe.load_model
    if broken is not None:
        recipe.load_model = lambda *a, **k: without_gradient(load(*a, **k), *broken)
    cfg = load_config(recipe.Config, ["--config", f"{folder}/config.yaml", *words])
    try:
        recipe.check(cfg)
        recipe.main(cfg)
    except UserError as error:
        return str(error)
    return ""


def without_gradient(model: nn.Module, name: str, expert: int) -> nn.Module:
    module = model.get_submodule(name)
    assert isinstance(module, LowRankExpertLinear)
    factor = module.of_each
    size, held = len(factor) // module.experts, local_rows(factor)
    rows = torch.arange(held.start, held.stop) // size == expert

    def lose(param: Tensor) -> None:
        assert param.grad is not None
        local_part(param.grad)[rows] = 0

    factor.register_post_accumulate_grad_hook(lose)
    return model


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
    words += [f"max_steps={UPDATES}", f"output_dir={run}"]
    assert train(folder, words) == ""
    start = adapter_parameters(adapted_model(folder / "model", config))
    loaded = (QuantizationConfig(), f"{run}/adapter", ShardingConfig(), cpu_world())
    trained = load_for_inference(ModelConfig(f"{folder}/model", dtype="fp32"), *loaded)
    moved = total = 0
    for name, module in low_rank_linears(trained):
        count = getattr(module, "experts", 1)
        for field in ("lora_A", "lora_B", *(["magnitude"] if method == "dora" else [])):
            now = getattr(module, field).view(count, -1)
            before = start[f"base_model.model.{name}.{PEFT_FIELDS[field]}"].view(count, -1)
            moved += int((now != before).any(1).sum())
            total += count
    assert moved == total > 0

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


BROKEN = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("sharing", ["null", "outer"])
def test_a_run_whose_adapter_gets_no_gradient_stops_and_names_it(
    sharing: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_watch, "UPDATES", 2)
    run = folder / f"stopped-{sharing}"
    words = ["adapter.rank=4", f"adapter.expert_sharing={sharing}", "max_steps=3"]
    words += [f"output_dir={run}"]
    message = train(folder, words, (BROKEN, 2))
    assert message.startswith(f"adapter of {BROKEN}, expert 2: no gradient in the first 2 updates")
    assert "\n" not in message
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_run_on_two_ranks_stops_after_20_updates(folder: Path) -> None:
    words = ["adapter.rank=4", f"max_steps={UPDATES + 1}", f"output_dir={folder}/two"]
    for message in run_ranks(2, train, folder, words, (BROKEN, 2)):
        assert message.startswith(f"adapter of {BROKEN}, expert 2: no gradient in the first 20 upd")
    assert len((folder / "two/metrics.jsonl").read_text().splitlines()) == UPDATES - 1


@pytest.mark.slow
def test_experts_that_are_divided_keep_their_numbers_in_the_message(folder: Path) -> None:
    words = ["adapter.rank=4", f"max_steps={UPDATES + 1}", f"output_dir={folder}/parts"]
    words += ["sharding.expert_parallel=2"]
    for message in run_ranks(2, train, folder, words, (BROKEN, 3)):
        assert message.startswith(f"adapter of {BROKEN}, expert 3: no gradient in the first 20 upd")
