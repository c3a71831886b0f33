"""What earlier commits wrote is resumed, loaded, merged and reported, with the numbers of then.

`tests/released/make.py` made each folder with that commit's own code.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from tests.json_lines import metric_lines
from tests.released.make import CONFIG, HERE, MODEL, STEP
from tests.tiny import ROOT, load_recipe, run_recipe

NAMES = sorted(path.parent.name for path in HERE.glob("*/merged"))
OLDEST = "561a8e2"
STEPS = 7


def logged(run: Path, name: str) -> dict[int, float]:
    lines = metric_lines(run)
    return {line["step"]: line[name] for line in lines if name in line}


def losses(run: Path) -> dict[int, float]:
    return logged(run, "loss")


@pytest.fixture
def config(name: str, tmp_path: Path) -> list[str]:
    """Words for the config of the run `name`."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.replace("MODEL", str(MODEL)))
    words = ["--config", str(file)]
    if OmegaConf.load(HERE / name / "run/config.yaml").lr_scheduler is None:
        words.append("lr_scheduler=null")
    return words


def test_there_are_released_folders() -> None:
    assert len(NAMES) >= 3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == OLDEST else pytest.mark.long) for name in NAMES]
)
def test_a_run_goes_on_and_is_reported(name: str, tmp_path: Path, config: list[str]) -> None:
    then = losses(HERE / name / "run")
    assert len(then) == STEPS
    run = tmp_path / "run"
    shutil.copytree(HERE / name / "run", run)
    run_recipe("qdora_distributed", [*config, f"output_dir={run}", "resume=auto"])
    assert losses(run) == pytest.approx(then, abs=1e-5)
    adapter = "adapter/adapter_model.safetensors"
    for key, weight in load_file(HERE / name / "run" / adapter).items():
        assert (load_file(run / adapter)[key] - weight).abs().max() < 1e-4, key
    report = load_recipe("report")
    report.main(report.Config(runs=[str(run)], output=str(tmp_path / "page.html")))
    assert "loss" in (tmp_path / "page.html").read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_folder_is_trained_on(name: str, tmp_path: Path, config: list[str]) -> None:
    """By the run that goes on from the checkpoint, and by a new one."""
    then = losses(HERE / name / "run")
    rest = {step: loss for step, loss in then.items() if step > STEP}
    quantized = [*config, f"model.path={HERE / name / 'quantized'}"]
    checkpoint = HERE / name / f"run/checkpoints/step_{STEP:08}"
    resumed = [f"output_dir={tmp_path / 'on'}", f"resume={checkpoint}"]
    run_recipe("qdora_distributed", [*quantized, *resumed])
    assert losses(tmp_path / "on") == pytest.approx(rest, abs=1e-5)
    run_recipe("qdora_distributed", [*quantized, f"output_dir={tmp_path / 'new'}"])
    assert losses(tmp_path / "new") == pytest.approx(then, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_merged_and_trained_further(
    name: str, tmp_path: Path, config: list[str]
) -> None:
    adapter = HERE / name / "run/adapter"
    words = [f"model.path={MODEL}", "model.dtype=fp32", f"adapter={adapter}"]
    words += ["--config", str(ROOT / "configs/merge.yaml"), f"output_dir={tmp_path / 'merged'}"]
    run_recipe("merge", words)
    then = load_file(HERE / name / "merged/model.safetensors")
    now = load_file(tmp_path / "merged/model.safetensors")
    assert now.keys() == then.keys()
    for key, weight in then.items():  # bf16: a rounding apart at most
        assert (now[key].float() - weight.float()).abs().max() < 1e-2, key
    start = [f"adapter.start_from={adapter}", f"output_dir={tmp_path / 'further'}"]
    run_recipe("qdora_distributed", [*config, *start, "optimizer.lr=1e-9"])
    before, further = losses(HERE / name / "run"), losses(tmp_path / "further")
    assert further[1] < before[1]  # it begins where the adapter ended


@pytest.mark.parametrize("name", ["8a72c742"])
def test_a_longer_run_follows_its_own_schedule(
    name: str, tmp_path: Path, config: list[str]
) -> None:
    """From the step after the checkpoint on, whose learning rate is that of the shorter run."""
    checkpoint = HERE / name / f"run/checkpoints/step_{STEP:08}"
    words = [f"output_dir={tmp_path / 'on'}", f"resume={checkpoint}", "epochs=2", "max_steps=6"]
    run_recipe("qdora_distributed", [*config, *words])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)
    rates = {step: 1e-2 * schedule.lr_lambdas[0](step - 1) for step in (5, 6)}
    assert logged(tmp_path / "on", "lr") == pytest.approx(rates)
