"""Held-out batches that are larger than those of training: their memory, before a run and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.estimate import STEP, _peak_within_steps
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.sharding import ShardingConfig
from qfsdp.evaluation.heldout_loss import batch_losses
from qfsdp.planning import preflight
from qfsdp.planning.estimate import estimate
from qfsdp.planning.held_out import held_out_step
from qfsdp.planning.oom import Run, explain_out_of_memory
from qfsdp.planning.preflight import check_memory
from qfsdp.training.steps import StepClock
from qfsdp.training.validation import ValidationConfig
from tests.memory.test_estimate import load, parts_of_a_step, read_config
from tests.ranks import run_ranks
from tests.tiny import load_recipe, write_tiny_model
from tests.toy_data import TOY_CONFIG, TOY_PAIRS

pytestmark = pytest.mark.usefixtures("eager")
SEVERAL = "adapters: {{one: {{rank: 4}}, two: {{rank: 8}}}}\n"
WORDS = ("batch_size=32", "gradient_accumulation_steps=1")


def measured(model: Path) -> int:
    """Most bytes that PyTorch's allocator held in an evaluation after an update."""
    recipe, cfg = read_config(model, *WORDS)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        world, net, optimizer, batch = parts_of_a_step(recipe, cfg)
        clock = recipe.StepClock(world.device)
        recipe.train_step(net, optimizer, None, [batch], 1.0, world, clock)
        for _ in range(3):
            with torch.profiler.record_function(STEP):
                batch_losses(net, [batch], world)
    return _peak_within_steps(profiler)


@pytest.mark.long
def test_an_evaluation_takes_the_estimated_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as on the ranks
    model = write_tiny_model(tmp_path / "model", vocab_size=2048, intermediate_size=512)
    (held,) = run_ranks(1, measured, model)
    build, _, cfg = load(model, *WORDS, "checkpoint.every_minutes=null")
    found = estimate(build, held_out_step, cfg, 1, target="cpu")
    print(f"{found.peak} of {held}: {found.peak / held - 1:+.3f}")
    assert found.peak == pytest.approx(held, rel=0.03)
    assert found.peak >= 0.99 * held


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        pytest.param("qdora_distributed", TOY_CONFIG, marks=pytest.mark.long),
        pytest.param("dpo_distributed", TOY_PAIRS, marks=pytest.mark.long),
        ("reward_distributed", TOY_PAIRS),
        pytest.param("several_adapters", TOY_CONFIG + SEVERAL, marks=pytest.mark.long),
    ],
)
def test_one_that_does_not_fit_is_refused(recipe: str, config: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    text = config.format(folder=tmp_path).replace("preflight: false", "preflight: true")
    text += "output_dir: x\nvalidation: {sets: {held: {_component_: tests.toy_data.Samples}}}\n"
    (tmp_path / "c.yaml").write_text(text)

    def check(*words: str) -> None:
        module = load_recipe(recipe)
        argv = ["--config", f"{tmp_path}/c.yaml", "device_memory=1GiB", *words]
        cfg = load_config(module.Config, argv)
        check_memory(cfg, module.build_model, module.train_step)

    check("validation.batch_size=4")
    with pytest.raises(UserError, match=r"validation.batch_size: 4000; .*: 1\.00 GiB"):
        check("validation.batch_size=4000")
    check("validation.batch_size=4000", "validation.sets={}")


def test_a_dry_run_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    write_tiny_model(tmp_path / "model")
    text = TOY_CONFIG.format(folder=tmp_path).replace("preflight: false", "preflight: true")
    (tmp_path / "c.yaml").write_text(text + "output_dir: x\n")
    monkeypatch.setattr(preflight, "check_held_out", fails)
    module = load_recipe()
    cfg = load_config(module.Config, ["--config", f"{tmp_path}/c.yaml", "device_memory=4GiB"])
    check_memory(cfg, module.build_model, module.train_step)
    assert "training starts without a check (RuntimeError: no such" in "".join(capsys.readouterr())


@dataclass
class Config:
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


@pytest.mark.parametrize("size", [None, 8])
def test_a_run_that_ends_in_one_says_so(size: int | None) -> None:
    @explain_out_of_memory
    def main(cfg: Any, run: Run) -> None:
        run.step, run.clock = 3, StepClock(torch.device("cpu"))
        with run.clock.phase("validation"):
            torch.empty(2**50)

    with pytest.raises(UserError) as caught:
        main(Config(ValidationConfig(batch_size=size)))
    assert "at step 3, validation" in str(caught.value)
    assert ("try validation.batch_size=null" in str(caught.value)) == (size is not None)
