"""`checkpoint.publish`: what a server sees is complete at any time."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.checkpoint import publish
from qfsdp.checkpoint.adapter_files import adapter_export
from qfsdp.checkpoint.publish import Publisher
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer, TrainState
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.training.run_config import check_run_config
from tests.models import adapted_model, cpu_world
from tests.tiny import load_recipe, write_tiny_model

FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    return folder


def write(adapter: Path, step: int) -> Path:
    for name in FILES:
        (adapter / name).write_text(f"{name} of {step}")
    return adapter


def check_seen(folder: Path, steps: list[int]) -> None:
    """What a server sees is these steps, whole, and the link to the last."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert names == [*(["latest"] if steps else []), *(f"step_{step:06d}" for step in steps)]
    for step in steps:
        for name in FILES:
            assert (folder / f"step_{step:06d}" / name).read_text() == f"{name} of {step}"


def newest(folder: Path) -> str:
    return (folder / "latest").resolve(strict=True).name


def test_keeps_the_last_and_links_the_newest(tmp_path: Path, adapter: Path) -> None:
    folder = tmp_path / "served"
    publisher = Publisher(folder, keep=2)
    for step, seen in ((100, [100]), (200, [100, 200]), (300, [200, 300]), (300, [200, 300])):
        publisher.publish(step, write(adapter, step))
        check_seen(folder, seen)
        assert newest(folder) == f"step_{step:06d}"
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == {".lock"}
    with pytest.raises(UserError, match=r"^checkpoint.publish: '.*' is being written by process"):
        Publisher(folder, keep=2)
    publisher.close()
    Publisher(folder, keep=2).publish(50, write(adapter, 50))  # another run, from its beginning
    check_seen(folder, [50, 300])
    assert newest(folder) == "step_000050"


def test_full_disk_costs_one_line(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    publisher = Publisher(tmp_path / "served", keep=2)
    publisher.publish(100, write(adapter, 100))

    def full(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        publisher.publish(200, write(adapter, 200))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: checkpoint.publish: '") and "No space left on device" in line
    check_seen(tmp_path / "served", [100])
    publisher.publish(300, write(adapter, 300))
    check_seen(tmp_path / "served", [100, 300])


class Killed(BaseException):
    pass


STEPS = [(shutil, "copyfile"), (publish, "sync_folder"), (publish, "sync"), (publish, "_remove")]
STEPS += [(Path, "rename"), (Path, "symlink_to"), (Path, "replace")]


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("after", [False, True])
def test_kills_leave_no_half_folder(
    tmp_path: Path,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: Any,
) -> None:
    """At every call that changes the disk: before it is made, and just after."""
    folder = tmp_path / "served"
    for call in range(6):
        shutil.rmtree(folder, ignore_errors=True)
        publisher = Publisher(folder, keep=1)
        publisher.publish(100, write(adapter, 100))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed_at(call, getattr(owner, name), after))
            try:
                publisher.publish(200, write(adapter, 200))
            except Killed:
                pass
            else:
                assert call  # the call was made at least once
                return
        publisher.close()
        steps = sorted(int(path.name[5:]) for path in folder.glob("step_*"))
        assert steps in ([100], [100, 200], [200])
        check_seen(folder, steps)
        assert newest(folder) in ("step_000100", "step_000200")
        again = Publisher(folder, keep=1)
        again.publish(300, write(adapter, 300))
        again.close()
        check_seen(folder, [300])
        assert {path.name for path in folder.iterdir()} == {".lock", "latest", "step_000300"}


def killed_at(call: int, function: Callable[..., Any], after: bool) -> Callable[..., Any]:
    made = iter(range(100))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        last = next(made) == call
        if last and not after:
            raise Killed
        found = function(*args, **kwargs)
        if last:
            raise Killed
        return found

    return wrapped


def test_checkpoints_publish_their_adapters(tmp_path: Path) -> None:
    config = AdapterConfig("lora", rank=4)
    model = adapted_model(write_tiny_model(tmp_path / "model"), config, format="none")
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=0.1)
    section = CheckpointConfig(publish=str(tmp_path / "served"), publish_last=1)
    saver = Checkpointer(section, tmp_path / "run", cpu_world(), adapter_export(config, "base"))
    saver.find(None, dict)
    state = TrainState(model, optimizer, None)
    for step in (1, 2):
        saver.save(step, state)
    saver.close()
    inside = tmp_path / "run" / "checkpoints" / "step_00000002" / "adapter"
    for name in FILES:
        published = tmp_path / "served" / "latest" / name
        assert published.read_bytes() == (inside / name).read_bytes()
    assert newest(tmp_path / "served") == "step_000002"
    assert not (tmp_path / "served" / "step_000001").exists()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="publish_last"):
        CheckpointConfig(publish_last=0).check()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^checkpoint.publish: '.*file' cannot be written"):
        Publisher(tmp_path / "file", keep=1)
    recipe: Any = load_recipe("full_finetune_distributed")
    cfg = recipe.Config("out", *[recipe.Component("x", {})] * 4)
    cfg.checkpoint = CheckpointConfig(publish="served")
    with pytest.raises(UserError, match=r"^checkpoint.publish: served; expected null"):
        check_run_config(cfg)


def test_the_order_is_that_of_steps_and_not_of_the_clock(tmp_path: Path, adapter: Path) -> None:
    folder = tmp_path / "served"
    publisher = Publisher(folder, keep=2)
    for step in (100, 200):
        publisher.publish(step, write(adapter, step))
        os.utime(folder / f"step_{step:06d}", (2**31, 2**31))  # the clock is set back after it
    publisher.publish(300, write(adapter, 300))
    check_seen(folder, [200, 300])
    assert newest(folder) == "step_000300"
    for step, seen in ((50, [50, 300]), (60, [50, 60])):  # another run, from its beginning
        publisher.publish(step, write(adapter, step))
        check_seen(folder, seen)


def test_a_run_killed_before_it_published_publishes_when_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AdapterConfig("lora", rank=4)
    model = adapted_model(write_tiny_model(tmp_path / "model"), config, format="none")
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=0.1)
    state = TrainState(model, optimizer, None)
    section = CheckpointConfig(publish=str(tmp_path / "served"), keep_last=1)

    def start() -> Checkpointer:
        export = adapter_export(config, "base")
        return Checkpointer(section, tmp_path / "run", cpu_world(), export)

    saver = start()
    saver.find(None, dict)
    saver.save(1, state)
    saver.wait()
    with monkeypatch.context() as patch:  # killed after the rename: nothing that follows is done
        patch.setattr(Checkpointer, "_after_rename", lambda *_: None)
        saver.save(2, state)
        saver.close()
    assert newest(tmp_path / "served") == "step_000001"
    saver = start()
    assert saver.load(saver.find("auto", dict), state) == 2
    saver.close()
    assert newest(tmp_path / "served") == "step_000002"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]
    link = (tmp_path / "served" / "latest").lstat()
    saver = start()
    saver.load(saver.find("auto", dict), state)  # published already: nothing is written again
    saver.close()
    assert (tmp_path / "served" / "latest").lstat().st_ino == link.st_ino
