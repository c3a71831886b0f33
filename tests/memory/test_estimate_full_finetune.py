"""Estimates of full finetuning, against real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.estimate import STEP, STEPS, _peak_within_steps
from qfsdp.checkpoint.state import Stager, TrainState
from qfsdp.config.load import load_config
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.planning.estimate import estimate
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.hardware import HardwareConfig
from qfsdp.planning.predict import Predictor
from qfsdp.planning.search import candidates, search
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, write_tiny_model

CASES = [
    (),
    ("model.dtype=fp32",),
    ("optimizer_in_backward=true", "clip_grad_norm=null"),
    ("trainable.layers=[1]", "quantization.format=nf4"),
]


def read_config(model: Path, *words: str) -> tuple[Any, Any]:
    """The recipe and its config."""
    recipe = load_recipe("full_finetune_distributed")
    argv = ["--config", str(ROOT / "configs/smollm2_135m_full.yaml"), f"model.path={model}"]
    return recipe, load_config(recipe.Config, [*argv, "max_seq_len=64", "batch_size=2", *words])


def load(model: Path, *words: str) -> tuple[Any, Any, Any]:
    """The first arguments of an estimate."""
    recipe, cfg = read_config(model, *words)
    return recipe.build_model, recipe.train_step, cfg


def measured(model: Path) -> list[int]:
    """Most bytes that PyTorch's allocator held in real steps, for every case."""
    return [measured_one(*read_config(model, *words)) for words in CASES]


def measured_one(recipe: Any, cfg: Any) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        world = recipe.init_world(cfg.sharding, casts=cfg.trainable.casts(cfg.model.dtype))
        net = recipe.load_model(cfg, world)
        trained = trainable_parameters(net)
        optimizer = recipe.build_optimizer(cfg.optimizer, trained, cfg.optimizer_in_backward)
        tokens = torch.zeros(cfg.batch_size, cfg.max_seq_len, dtype=torch.int64)
        batches = [recipe.Batch(tokens, tokens.clone(), tokens.numel())]
        clock = recipe.StepClock(world.device)
        stager = Stager(world)
        for step in range(STEPS):
            with torch.profiler.record_function(STEP):
                recipe.train_step(net, optimizer, None, batches, cfg.clip_grad_norm, world, clock)
            kept = stager.copy(TrainState(net, optimizer, None), step)
    del kept
    return _peak_within_steps(profiler)


@pytest.mark.usefixtures("eager")
def test_a_run_takes_the_estimated_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, with and without FSDP2 casting fp32 weights to bf16."""
    model = write_tiny_model(tmp_path / "model", vocab_size=2048, intermediate_size=512)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as on the rank
    for words, held in zip(CASES, run_ranks(1, measured, model)[0], strict=True):
        found = estimate(*load(model, *words), 1, target="cpu")
        print(f"{words}: {found.peak} of {held}: {found.peak / held - 1:+.4f}")
        assert found.peak == pytest.approx(held, rel=0.01), words


def test_no_extrapolation_if_only_some_layers_are_trained(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", num_hidden_layers=8, hidden_size=96)
    given = load(model, "trainable.layers=[6]")
    assert estimate_fast(*given, 2) == estimate(*given, 2)


def test_the_search_does_not_offload_a_base_that_is_trained(tmp_path: Path) -> None:
    """All weights are trained, so candidates that offload frozen weights are left out."""
    model = write_tiny_model(tmp_path / "model")
    hardware = HardwareConfig(gpu="h100", device_memory="10MiB").build()
    predict = Predictor(*load(model), 1, 1, hardware)
    found = [trial.candidate.offload for trial in search(candidates(1), predict, 2, hardware)]
    assert found == ["none", "none", "all_to_cpu", "all_to_cpu"]
