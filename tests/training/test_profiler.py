"""Profiler: real traces of a small model's training steps."""

from __future__ import annotations

import gzip
import json
import pickle
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.training.profiler import Profiler, ProfilerConfig
from qfsdp.training.steps import StepClock
from tests.tiny import TINY_CONFIG

pytestmark = pytest.mark.usefixtures("eager")
CPU = torch.device("cpu")
PHASES = {"forward", "backward", "optimizer"}


def take_steps(profiler: Profiler, steps: int, device: torch.device = CPU) -> None:
    """Trains a small model with each step inside `profiler.step`."""
    with device:
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
        add_adapters(model, AdapterConfig(rank=4))
        tokens = torch.randint(0, 577, (2, 16))
    init_adapters(model, seed=0)
    optimizer = torch.optim.AdamW(trainable_parameters(model))
    clock = StepClock(device)
    for step in range(1, steps + 1):
        with profiler.step(step):
            with clock.phase("forward"):
                loss = model(tokens, labels=tokens)
            with clock.phase("backward"):
                loss.backward()
            with clock.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


def written(output_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(output_dir)) for path in output_dir.rglob("*.*"))


def events(output_dir: Path, step: int, rank: int = 0) -> list[dict[str, Any]]:
    file = output_dir / f"profile/step_{step:08}_rank{rank}.json.gz"
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_chosen_steps_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take_steps(Profiler(ProfilerConfig(steps=[2, 4, 9]), tmp_path, World(CPU)), 4)
    names = [f"profile/step_{step:08}_rank0.json.gz" for step in (2, 4)]
    assert written(tmp_path) == names
    printed = [
        f"profile of step {n}: {tmp_path / name}" for n, name in zip((2, 4), names, strict=True)
    ]
    assert capsys.readouterr().out.splitlines() == printed
    for step in (2, 4):
        found = events(tmp_path, step)
        ranges = {e["name"]: e for e in found if e.get("cat") == "user_annotation"}
        assert set(ranges) >= PHASES
        assert [e["name"] for e in found].count("forward") == 1  # only this step is recorded
        # The operations of adapted linears lie within the phases that called them.
        for phase, op in (
            ("forward", "qfsdp::adapted_linear"),
            ("backward", "qfsdp::adapted_linear_backward"),
        ):
            begin, end = ranges[phase]["ts"], ranges[phase]["ts"] + ranges[phase]["dur"]
            calls = [e for e in found if e["name"] == op]
            assert len(calls) == 8  # q, k and v; o; gate and up; down, of 2 layers
            assert all(begin <= call["ts"] <= end for call in calls)


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("stacks", [True, False])
def test_memory_and_stacks(tmp_path: Path, memory: bool, stacks: bool) -> None:
    config = ProfilerConfig(steps=[1], memory=memory, stacks=stacks)
    take_steps(Profiler(config, tmp_path, World(CPU)), 1)
    found = events(tmp_path, 1)
    assert any(e["name"] == "[memory]" for e in found) == memory
    assert any("transformer.py" in e["name"] for e in found) == stacks


def test_only_chosen_ranks_record(tmp_path: Path) -> None:
    config = ProfilerConfig(steps=[1], ranks=[1, 2])
    for rank in range(4):
        take_steps(Profiler(config, tmp_path, World(CPU, rank, size=4)), 1)
    assert written(tmp_path) == [f"profile/step_00000001_rank{rank}.json.gz" for rank in (1, 2)]
    assert {e["name"] for e in events(tmp_path, 1, rank=2)} >= PHASES


def test_off_by_default(tmp_path: Path) -> None:
    profiler = Profiler(ProfilerConfig(), tmp_path, World(CPU))
    take_steps(profiler, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "profile/step_00000001_rank0.json.gz"
    gzip_open, full = gzip.open, iter(["/dev/full"])  # in place of the first file
    monkeypatch.setattr(gzip, "open", lambda path, mode: gzip_open(next(full, path), mode))
    take_steps(Profiler(ProfilerConfig(steps=[1, 2]), tmp_path, World(CPU)), 2)
    output = capsys.readouterr()
    assert f"warning: '{file}' cannot be written: " in output.err
    assert "No space left on device" in output.err and len(output.err.splitlines()) == 1
    assert "profile of step 2" in output.out and "profile of step 1" not in output.out
    assert written(tmp_path) == ["profile/step_00000002_rank0.json.gz"]


def test_an_incomplete_trace_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))  # larger writes fail
    try:
        take_steps(Profiler(ProfilerConfig(steps=[1]), tmp_path, World(CPU)), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step_00000001_rank0.json.gz' cannot be written" in capsys.readouterr().err
    assert list(tmp_path.rglob("profile/*")) == []


def test_a_folder_that_cannot_be_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").touch()
    take_steps(Profiler(ProfilerConfig(steps=[1]), tmp_path, World(CPU)), 2)
    assert "warning: " in capsys.readouterr().err


def test_a_failing_step_raises_as_without_the_profiler(tmp_path: Path) -> None:
    profiler = Profiler(ProfilerConfig(steps=[1]), tmp_path, World(CPU))
    with pytest.raises(ZeroDivisionError), profiler.step(1):
        raise ZeroDivisionError
    assert written(tmp_path) == []
    take_steps(profiler, 1)  # the next recording works
    assert {e["name"] for e in events(tmp_path, 1)} >= PHASES


@pytest.mark.parametrize(("field", "value"), [("steps", [3, 0]), ("ranks", [0, -1])])
def test_check(field: str, value: list[int]) -> None:
    ProfilerConfig().check()
    with pytest.raises(InvalidField, match=f"{field}: .* is not valid; expected a list"):
        ProfilerConfig(**{field: value}).check()


def test_ranks_outside_of_the_world(tmp_path: Path) -> None:
    config = ProfilerConfig(steps=[1], ranks=[0, 2])
    with pytest.raises(UserError, match=r"^profiler\.ranks: 2 .*; expected 0 to 1$"):
        Profiler(config, tmp_path, World(CPU, rank=1, size=2))


@dataclass
class Recipe:
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


def test_section_of_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("profiler:\n  steps: [3, 8]\n")
    argv = ["--config", str(file)]
    loaded = load_config(Recipe, [*argv, "profiler.ranks=[1]"]).profiler
    assert loaded == ProfilerConfig(steps=[3, 8], ranks=[1])
    with pytest.raises(UserError, match=r"^profiler\.steps: \[0\] is not valid; expected a list"):
        load_config(Recipe, [*argv, "profiler.steps=[0]"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_memory_snapshot_of_a_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    take_steps(Profiler(ProfilerConfig(steps=[2]), tmp_path, World(device)), 3, device)
    name = "profile/step_00000002_rank0"
    assert written(tmp_path) == [f"{name}.json.gz", f"{name}_memory.pickle"]
    found = events(tmp_path, 2)
    assert {e["name"] for e in found} >= PHASES
    assert any(e.get("cat") == "kernel" for e in found)
    snapshot = pickle.loads((tmp_path / f"{name}_memory.pickle").read_bytes())
    allocated = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    frames = {frame["filename"] for entry in allocated for frame in entry["frames"]}
    assert any(file.endswith("adapted_op.py") for file in frames)
