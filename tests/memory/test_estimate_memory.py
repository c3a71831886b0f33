"""`tune run recipes/estimate_memory`: its table, verdict and picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.config.tool_config import run_tool
from qfsdp.planning import options
from qfsdp.planning.estimate import Estimate
from qfsdp.planning.known_models import find_config
from qfsdp.planning.options import GIB, option_lines
from qfsdp.planning.tracker import Point
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
        ("optimizer.fsued=true", "optimizer.fsued: 'torch.optim.AdamW' takes no argument 'fsued'"),
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


@pytest.mark.slow
def test_options_have_the_estimates_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells are what the tool says of that config alone."""
    shape = find_config("Llama-2-7B") | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = [f"model.path={tmp_path}", "world_size=2", "gpu=rtx4090"]
    monkeypatch.setattr(options, "CHECKPOINTING", ("full",))
    run(monkeypatch, *words, "options=true")
    lines = capsys.readouterr().out.splitlines()[2:7]
    ddp, _, full_shard, base, whole = (
        [c.strip() for c in x.split("  ") if c.strip()] for x in lines
    )
    words += ["activation.checkpointing=full", f"picture={tmp_path}/step.png"]
    for cells, *more in (
        (ddp, "sharding.strategy=ddp"),
        (full_shard, "sharding.strategy=full_shard"),
        (base, "sharding.offload_base=cpu"),
        (whole, "sharding.cpu_offload=true"),
    ):
        run(monkeypatch, *words, *more)
        says = re.search(r"CUDA context and NCCL: about ([\d.]+) GiB", capsys.readouterr().out)
        assert says is not None and says[1] in cells and cells[-1] == "yes"


def test_options_that_do_not_fit_or_are_refused() -> None:
    """Of two machines of two GPUs; only what is offloaded may be refused."""
    recipe = load_recipe("qdora_distributed")
    cfg = load_config(recipe.Config, CONFIG)

    def of(changed: Any, way: str) -> Estimate:
        assert way.startswith(changed.sharding.strategy)
        if changed.sharding.offload_base == "cpu":
            raise UserError("nothing is frozen")
        peak = (1 + (changed.sharding.strategy == "ddp")) * GIB
        point = Point("", "", 0.0, {})
        moved = {"to_device": GIB, "to_host": GIB}
        return Estimate(peak, {}, point, 0, {"x": GIB}, {"a": GIB}, moved, reserved=peak)

    lines = [*option_lines(cfg, of, 4, 2, int(1.5 * GIB))]
    assert len(lines) == 1 + 6 * 3 + 1 and lines[0].split("  ")[0] == "strategy"
    assert lines[1].split()[-5:] == ["2.00", "8.00", "1.00", "2.00", "no"]
    assert lines[10].split() == [*("full_shard", "none", "1.00", "8.00", "1.00", "2.00", "yes")]
    assert lines[13].endswith("refused: nothing is frozen") and "base in the host" in lines[13]
    assert len([*option_lines(cfg, of, 1, 1, None)]) == 1 + 3 * 3 + 1
