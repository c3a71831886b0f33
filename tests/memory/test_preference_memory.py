"""A step of preference tuning takes the memory of supervised tuning on the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.estimate import STEP, _peak_within_steps
from qfsdp.config.load import load_config
from qfsdp.planning.estimate import estimate
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, write_tiny_model

SFT, DPO = "qdora_distributed", "dpo_distributed"
CONFIGS = {SFT: "smollm2_135m_qdora", DPO: "smollm2_135m_dpo"}
ROWS, SEQ, STEPS = 4, 64, 4
WEIGHTS = ("parameters_quantized", "parameters_plain", "parameters_trained", "optimizer_state")

pytestmark = pytest.mark.usefixtures("eager")


def read(name: str, model: Path) -> tuple[Any, Any]:
    """A recipe and its config: the same model, adapters and tokens for both."""
    recipe = load_recipe(name)
    words = [f"model.path={model}", f"max_seq_len={SEQ}", "adapter.method=dora", "adapter.rank=16"]
    words += ["adapter.targets=all-linear", "optimizer.lr=1e-4"]
    words += [f"batch_size={ROWS if name == SFT else ROWS // 2}"]  # a pair is two rows
    return recipe, load_config(recipe.Config, ["--config", str(ROOT / config(name)), *words])


def config(name: str) -> str:
    return f"configs/{CONFIGS[name]}.yaml"


def measured(model: Path, name: str) -> tuple[int, int]:
    """Most bytes that PyTorch's allocator held in real steps, and the bytes of all parameters."""
    from qfsdp.data.batch import Batch
    from qfsdp.data.preferences.batch import full_preferences
    from qfsdp.distributed.gradients import trainable_parameters
    from qfsdp.training.preference import Objective

    recipe, cfg = read(name, model)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        world = recipe.init_world()
        net = recipe.load_model(cfg, world)
        optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(net))
        tokens = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 577
        batch = Batch(tokens, tokens.clone(), tokens.numel(), targets=tokens.numel())
        options = {}
        if name == DPO:
            batch = full_preferences(batch, paired=True)
            options["objective"] = Objective(cfg.loss, cfg.reference)
        for _ in range(STEPS):
            clock = recipe.StepClock(world.device)
            with torch.profiler.record_function(STEP):
                recipe.train_step(net, optimizer, None, [batch], 1.0, world, clock, **options)
    held = {}
    for param in net.parameters():
        local = getattr(param, "_local_tensor", param).data
        for part in (getattr(local, "qdata", local), *getattr(local, "metadata", ())):
            held[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return _peak_within_steps(profiler), sum(held.values())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", vocab_size=2048, intermediate_size=512)


def test_no_second_copy_of_a_weight_and_no_second_peak(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By estimate, a dry run of the recipe's own step."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = {}
    for name in (SFT, DPO):
        recipe, cfg = read(name, model)
        found[name] = estimate(recipe.build_model, recipe.train_step, cfg, 1, target="cpu")
    sft, dpo = found[SFT], found[DPO]
    print(f"peaks {sft.peak} and {dpo.peak}, between steps {sft.steady} and {dpo.steady}")
    for kind in WEIGHTS:
        assert dpo.at_peak[kind] == sft.at_peak[kind] > 0, kind
    numbers = 64 * ROWS * SEQ  # those of samples and of targets, a few bytes of each token
    assert dpo.steady - sft.steady <= numbers and dpo.peak - sft.peak <= numbers
    assert numbers < 0.01 * sft.peak


@pytest.mark.long
def test_a_run_takes_the_memory_of_supervised_tuning(model: Path) -> None:
    """Counted by PyTorch's allocator in real steps."""
    (sft, weights), (dpo, of_dpo) = (run_ranks(1, measured, model, name)[0] for name in (SFT, DPO))
    print(f"weights {weights} and {of_dpo} bytes, peaks {sft} and {dpo}: {dpo / sft - 1:+.3%}")
    assert of_dpo == weights
    assert dpo <= 1.02 * sft
