"""What earlier commits wrote is resumed, loaded, merged and reported, with the numbers of then.

`tests/released/make.py` made each folder with that commit's own code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.released.make import CONFIG, HERE, MODEL, STEP
from tests.tiny import ROOT, load_recipe, run_recipe

NAMES = sorted(path.parent.name for path in HERE.glob("*/merged"))
STEPS = 7


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.replace("MODEL", str(MODEL)))
    return ["--config", str(file)]


def test_there_are_released_folders() -> None:
    assert len(NAMES) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_and_is_reported(name: str, tmp_path: Path, config: list[str]) -> None:
    """Also from the folder that the commit quantized, and with a fresh run on it."""
    then = losses(HERE / name / "run")
    assert len(then) == STEPS
    rest = {step: loss for step, loss in then.items() if step > STEP}
    run = tmp_path / "run"
    shutil.copytree(HERE / name / "run", run)
    run_recipe("qdora_distributed", [*config, f"output_dir={run}", "resume=auto"])
    assert losses(run) == pytest.approx(then, abs=1e-5)
    adapter = "adapter/adapter_model.safetensors"
    for key, weight in load_file(HERE / name / "run" / adapter).items():
        assert (load_file(run / adapter)[key] - weight).abs().max() < 1e-4, key
    quantized = [*config, f"model.path={HERE / name / 'quantized'}"]
    resumed = ["output_dir=" + str(tmp_path / "on"), f"resume={run}/checkpoints/step_{STEP:08}"]
    run_recipe("qdora_distributed", [*quantized, *resumed])
    assert losses(tmp_path / "on") == pytest.approx(rest, abs=1e-5)
    run_recipe("qdora_distributed", [*quantized, f"output_dir={tmp_path / 'new'}"])
    assert losses(tmp_path / "new") == pytest.approx(then, abs=1e-5)
    report = load_recipe("report")
    report.main(report.Config(runs=[str(run)], output=str(tmp_path / "page.html")))
    assert "loss" in (tmp_path / "page.html").read_text()


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
