"""`tune run recipes/estimate_memory`: its table, verdict and picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qfsdp.config.tool_config import run_tool
from tests.tiny import ROOT, load_recipe, write_tiny_model

CONFIG = ["--config", str(ROOT / "configs/llama2_7b_qdora.yaml")]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    recipe = load_recipe("estimate_memory")
    monkeypatch.setattr(sys, "argv", ["estimate_memory", *CONFIG, *words])
    run_tool(recipe.Config, recipe.main)


@pytest.mark.long
def test_as_typed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    command = [str(Path(sys.executable).parent / "tune"), "run", "recipes/estimate_memory", *CONFIG]
    words = [f"model.path={model}", "world_size=3", "device_memory=24GiB", "sharding.wrap=linear"]
    done = subprocess.run(
        [*command, *words, f"output_dir={tmp_path}/run"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for text in (
        "model, 3 ranks",
        "peak per rank:",
        "parameters quantized",
        "fits into 24.00 GiB:",
    ):
        assert text in done.stdout
    assert (tmp_path / "run/memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_config_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    words = [f"model.path={model}", "device_memory=500MiB", "compile=true"]
    run(monkeypatch, *words, f"picture={tmp_path}/step.png")
    out = capsys.readouterr().out
    assert "does not fit into 500.00 MiB" in out and "estimated without compile" in out
    assert (tmp_path / "step.png").is_file()


def test_a_gpu_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    run(monkeypatch, f"model.path={model}", "gpu=RTX-4090", f"picture={tmp_path}/step.png")
    assert "fits into 23.60 GiB:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gpu=rtx4091", "gpu: 'rtx4091' is unknown; did you mean 'rtx4090'?"),
        ("gpu=t4", "model.dtype: 'bf16', which a t4 does not compute; expected fp16"),
        ("world_size=0", "world_size: 0 is not valid; expected an integer of at least 1"),
        (
            "world_size=1000000000",
            "world_size: 1000000000 is not valid; expected an integer of at ",
        ),
        ("max_seq_len=1000000000", "max_seq_len: 1000000000; expected at most 4096, the model's "),
        ("batch_size=100000000", "batch_size: 100000000 is not valid; expected an integer of at "),
        ("adapter.rank=1000000", "adapter.rank: 1000000; expected at most "),
        ("world_sizes=2", "unknown key 'world_sizes'"),
        ("adapter.rnak=2", "unknown key 'adapter.rnak'; did you mean 'adapter.rank'?"),
        ("local_world_size=2", "local_world_size: 2 is not valid; expected a divisor of 1"),
        ("model.path=models/GPT-5", "model.path: 'models/GPT-5' is not a model folder; expected"),
        ("device_memory=many", "device_memory: 'many'; expected a size such as 24GiB"),
        (
            "optimizer.fsued=true",
            "optimizer.fsued: 'torch.optim.AdamW' takes no argument 'fsued'",
        ),
        ("target=tpu", "target: 'tpu' is not valid; expected one of 'cuda', 'cpu'"),
    ],
)
def test_mistakes_are_one_line(
    word: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, word)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
