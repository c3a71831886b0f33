"""Damaged checkpoints are noticed, named and passed over; forged ones run nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException

from qfsdp.checkpoint.choose import find_checkpoints, published
from qfsdp.checkpoint.compatibility import read_settings, write_settings
from qfsdp.checkpoint.digests import describe_file
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer
from qfsdp.checkpoint.state import TrainState
from qfsdp.checkpoint.state_files import first_not_finite
from qfsdp.common.errors import UserError
from qfsdp.tensor_subclasses.dtensor import local_part, whole_tensor
from tests.models import cpu_world
from tests.ranks import run_ranks

NEWEST = "step_00000002"


def make_state() -> TrainState:
    """A small model that is trained as a whole; sharded if there are ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    if (mesh := cpu_world().mesh) is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainState(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def take_step(state: TrainState, step: int) -> None:
    for param in state.model.parameters():
        param.grad = torch.full_like(param, 0.1 * step)
    state.optimizer.step()


def checkpointer(folder: Path, **config: Any) -> Checkpointer:
    def export(tensors: dict[str, torch.Tensor], folder: Path) -> None:
        (folder / "adapter").mkdir()
        save_file(tensors, folder / "adapter" / "adapter_model.safetensors")

    return Checkpointer(CheckpointConfig(**config), folder, cpu_world(), export)


def save_two(folder: Path) -> None:
    """A run with checkpoints at steps 1 and 2."""
    state, saver = make_state(), checkpointer(folder)
    for step in (1, 2):
        take_step(state, step)
        saver.save(step, state)
    saver.close()


def resume(folder: Path, word: str = "auto") -> tuple[int, torch.Tensor]:
    """The step that a run goes on from, and its weights."""
    state, loader = make_state(), checkpointer(folder)
    try:
        step = loader.load(loader.find(word, dict), state)
    finally:
        loader.close()
    assert isinstance(state.model, nn.Sequential)
    return step, whole_tensor(state.model[0].weight).clone()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_two(tmp_path / "run")
    return tmp_path / "run"


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


# ---- damage ----------------------------------------------------------------------------------


def flip_and_resume(run: Path, flips: int) -> list[tuple[str, int, float]]:
    """Changes one byte, resumes, and changes it back, `flips` times: file, step and a sum."""
    draw, world, results = random.Random(0), cpu_world(), []
    newest = run / "checkpoints" / NEWEST
    files = files_of(newest)
    sizes = [file.stat().st_size for file in files]
    for at in range(flips):
        # A byte of every file, then more often of the larger ones, as disks do.
        file = at if at < len(files) else draw.choices(range(len(files)), sizes)[0]
        change = files[file], draw.randrange(sizes[file]), draw.randrange(1, 256)
        world.sum(0)  # waits for the other ranks
        if world.rank == 0:
            flip(*change)
        world.sum(0)
        step, weights = resume(run)
        results.append((str(files[file].relative_to(newest)), step, weights.sum().item()))
        if world.rank == 0:
            (run / "checkpoints" / f"{NEWEST}.damaged").rename(newest)
            flip(*change)
    world.sum(0)
    assert resume(run)[0] == 2, "the changes were not undone"
    return results


def flip(file: Path, place: int, mask: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= mask
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("ranks", "flips"),
    [(1, 20), (3, 8), *(pytest.param(n, 400, marks=pytest.mark.long) for n in (1, 3))],
)
def test_every_changed_byte_is_noticed(
    tmp_path: Path, ranks: int, flips: int, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(ranks, save_two, tmp_path)
    shutil.copytree(tmp_path, tmp_path / "first")
    shutil.rmtree(tmp_path / "first/checkpoints" / NEWEST)
    step, weights = resume(tmp_path / "first")
    assert step == 1
    capfd.readouterr()
    results = run_ranks(ranks, flip_and_resume, tmp_path, flips)[0]
    lines = capfd.readouterr().err.splitlines()
    folder = tmp_path / "checkpoints" / NEWEST
    for (name, *rest), line in zip(results, lines, strict=True):
        assert rest == [1, weights.sum().item()]
        assert line.startswith(f"warning: resume: '{folder}' is damaged: {name}: ")
        assert line.endswith(f"; kept as '{NEWEST}.damaged'; going on from 'step_00000001'")
    kinds = {Path(name).suffix or name for name, _, _ in results}
    assert kinds == {".distcp", "state/.metadata", ".safetensors", ".json"}


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def into_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


DISTCP, METADATA, FACTS = "state/__0_0.distcp", "state/.metadata", "facts.json"
ADAPTER = "adapter/adapter_model.safetensors"
DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("", empty, "facts.json: missing"),
    ("", into_file, "a file, not a folder"),
    ("", dangling, "missing"),
    ("state", empty, "state/.*: missing"),
    (DISTCP, Path.unlink, f"{DISTCP}: missing"),
    (DISTCP, truncate, rf"{DISTCP}: 100 bytes instead of \d{{5}}"),
    (DISTCP, into_folder, f"{DISTCP}: not a file"),
    (METADATA, Path.unlink, f"{METADATA}: missing"),
    (METADATA, truncate, rf"{METADATA}: 100 bytes instead of \d{{4}}"),
    (METADATA, loop, rf"{METADATA}: (missing|unreadable \(.*\))"),
    (ADAPTER, dangling, f"{ADAPTER}: missing"),
    (FACTS, Path.unlink, "facts.json: missing"),
    (FACTS, truncate, "facts.json: not JSON"),
    (FACTS, into_folder, "facts.json: not a file"),
    (FACTS, os.mkfifo, "facts.json: not a file"),
    (FACTS, write("\xff"), "facts.json: not JSON"),
    (FACTS, write("[1]"), "facts.json: not a JSON object"),
    (FACTS, write("[" * 100_000), "facts.json: not JSON"),
    (FACTS, write('{"files": {}}'), r"facts.json: content changed \(SHA-256\)"),
    (FACTS, write('{"sealed": 3}'), r"facts.json: content changed \(SHA-256\)"),
    (FACTS, write('{"step": "2", "world_size": 1, "facts": {}}'), "facts.json: not the facts .*"),
    (FACTS, write('{"step": 2, "world_size": 1, "facts": []}'), "facts.json: not the facts .*"),
]


@pytest.mark.parametrize(("name", "damage", "how"), DAMAGE)
def test_what_is_said_of_damage(
    run: Path, name: str, damage: Any, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / NEWEST
    if damage is os.mkfifo:
        (newest / name).unlink()
    damage(newest / name if name else newest)
    assert resume(run)[0] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: resume: '{newest}' is damaged: ")

    assert re.fullmatch(rf".* is damaged: {how}; kept as .*", line), line


def test_a_disk_that_cannot_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(stream: Any, digest: str) -> Any:
        if NEWEST in stream.name and stream.name.endswith(DISTCP):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return file_digest(stream, digest)

    file_digest = hashlib.file_digest
    monkeypatch.setattr("hashlib.file_digest", fail)
    assert resume(run)[0] == 1
    assert f"is damaged: {DISTCP}: unreadable (Input/output error); " in capsys.readouterr().err


def killed_while_hashing(folder: Path) -> None:
    from qfsdp.checkpoint import resume as module

    save_two(folder)
    module.describe_file = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    state, saver = make_state(), checkpointer(folder)
    saver.save(3, state)
    saver.wait()


def test_a_save_killed_while_it_hashes(tmp_path: Path) -> None:
    """The folder has no final name yet, and the next run removes it."""
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(1, killed_while_hashing, tmp_path)
    names = ["step_00000001", NEWEST, "step_00000003.partial"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
    assert resume(tmp_path)[0] == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names[:2]


def damage(checkpoint: Path) -> None:
    flip(checkpoint / DISTCP, 5000, 1)


def test_a_named_checkpoint_is_not_replaced(run: Path, tmp_path: Path) -> None:
    """The user is told which one beside it is intact."""
    older, newest = published(run)
    damage(newest)
    with pytest.raises(UserError) as error:
        resume(tmp_path / "new", str(newest))  # from another folder
    how = f"{DISTCP}: content changed (SHA-256)"
    assert str(error.value) == (
        f"resume: '{newest}' is damaged ({how}); expected '{older}', an intact one"
    )
    with pytest.raises(
        UserError, match=r"is damaged \(state/__.*; expected resume=auto, which takes"
    ):
        resume(run, str(newest))  # `older` is not the last one of this folder
    damage(older)
    with pytest.raises(UserError, match=r"is damaged \(.*\); expected an intact one$"):
        resume(tmp_path / "new", str(newest))
    assert published(run) == [older, newest], "nothing is renamed if no run goes on"


def test_the_checkpoints_of_another_run_are_not_renamed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newest = published(run)
    damage(newest)
    assert resume(tmp_path / "new", str(run))[0] == 1
    assert published(run) == [older, newest]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"warning: resume: '{newest}' is damaged: {DISTCP}: content changed (SHA-256); "
        f"going on from '{older.name}'"
    )


def test_all_are_damaged(run: Path) -> None:
    older, newest = published(run)
    damage(newest)
    truncate(older / FACTS)
    with pytest.raises(UserError) as error:
        resume(run)
    assert str(error.value) == (
        f"resume: all checkpoints in '{run}/checkpoints' are damaged ({newest.name}: {DISTCP}: "
        f"content changed (SHA-256); {older.name}: facts.json: not JSON); expected an intact one"
    )
    assert published(run) == [older, newest]


def test_a_damaged_checkpoint_is_kept(run: Path) -> None:
    """Its step is saved again. `keep_last` counts the others."""
    for _ in range(2):
        damage(run / "checkpoints" / NEWEST)
        state, saver = make_state(), checkpointer(run, keep_last=2, asynchronous=False)
        assert saver.load(saver.find("auto", dict), state) == 1
        saver.save(2, state)
        saver.close()
    assert resume(run)[0] == 2
    names = ["step_00000001", NEWEST, f"{NEWEST}.damaged", f"{NEWEST}.damaged2"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names


def test_a_checkpoint_of_an_earlier_version(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no digests: it is accepted with a warning, and passed over if it cannot be read."""
    for checkpoint in published(run):
        without_digests(checkpoint)
    older, newest = published(run)
    line = "warning: resume: '{}' has no digests (of an earlier version): it cannot be verified"
    assert resume(run)[0] == 2
    assert capsys.readouterr().err.splitlines() == [line.format(newest)]
    truncate(newest / METADATA)
    assert resume(run)[0] == 1
    damaged, unverified = capsys.readouterr().err.splitlines()
    assert damaged.startswith(f"warning: resume: '{newest}' is damaged: state: unreadable (")
    assert unverified == line.format(older)


def without_digests(checkpoint: Path) -> None:
    values = json.loads((checkpoint / FACTS).read_text())
    del values["files"], values["sealed"]
    (checkpoint / FACTS).write_text(json.dumps(values))


# ---- numbers that are not finite -------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_no_number_that_is_not_finite_is_saved(tmp_path: Path, ranks: int, number: float) -> None:
    """Neither trained tensors nor optimizer states; ranks fail together."""
    run_ranks(ranks, save_not_finite, tmp_path, number)


def save_not_finite(folder: Path, number: float) -> None:
    save_two(folder)
    state, saver = make_state(), checkpointer(folder)
    assert saver.load(saver.find("auto", dict), state) == 2
    bias = state.model[1].bias  # type: ignore[index]
    for name, tensor in (("trained of 1.bias", bias.data), ("exp_avg of 1.bias", None)):
        tensor = state.optimizer.state[bias]["exp_avg"] if tensor is None else tensor
        local, before = local_part(tensor), local_part(tensor).clone()
        local[-1:] = number  # the last rank may have no rows
        saver.save(3, state)
        with pytest.raises(UserError) as error:
            saver.wait()
        assert str(error.value) == (
            f"checkpoint: not written to '{folder}/checkpoints': {name} has numbers that are not "
            f"finite; '{folder}/checkpoints/{NEWEST}' is intact"
        )
        local.copy_(before)
    saver.close()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000001", NEWEST]


def test_the_scales_of_quantized_optimizer_states_are_looked_at() -> None:
    def first(**inner: torch.Tensor) -> str | None:
        return first_not_finite({}, {}, {"weight": {"exp_avg": {"inner": inner}}})

    codes = torch.zeros(4, dtype=torch.uint8)
    assert first(codes=codes, scale=torch.ones(2)) is None
    assert first(codes=codes, scale=torch.tensor([1, torch.inf])) == "exp_avg of weight"
    fp8 = torch.tensor([1, torch.nan]).to(torch.float8_e4m3fn)
    assert first(codes=fp8, scale=torch.ones(2)) == "exp_avg of weight"


def test_what_could_not_be_read_is_not_saved(run: Path) -> None:
    state, saver = make_state(), checkpointer(run)
    state.scheduler.folder = run  # type: ignore[union-attr]
    saver.save(3, state)
    with pytest.raises(UserError) as error:
        saver.close()
    assert str(error.value) == (
        f"checkpoint: not written to '{run}/checkpoints': the optimizer or the schedule holds a "
        f"{type(run).__module__}.PosixPath; expected numbers, texts and tensors; "
        f"'{run}/checkpoints/{NEWEST}' is intact"
    )


# ---- forged files ----------------------------------------------------------------------------


class Forged:
    """A pickle that creates a file when it is read as pickles usually are."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def forge(checkpoint: Path, kind: str, marker: Path) -> None:
    """Puts code into a checkpoint and, unless it has none, the right digests."""
    metadata = checkpoint / METADATA
    if kind == "metadata":
        metadata.write_bytes(pickle.dumps(Forged(marker)))
    else:
        forged = checkpoint / "state" / "forged.distcp"
        torch.save(Forged(marker), forged)
        stored = pickle.loads(metadata.read_bytes())
        pick = {"host": "host", "rank": "rank_0", "tensor": "trained"}[kind]
        for index, info in stored.storage_data.items():
            if index.fqn.startswith(pick):
                info.relative_path, info.offset = forged.name, 0
                info.length = forged.stat().st_size
        metadata.write_bytes(pickle.dumps(stored))
    values = read_settings(checkpoint)
    names = [str(path.relative_to(checkpoint)) for path in files_of(checkpoint)]
    files = {name: describe_file(checkpoint / name) for name in names if name != FACTS}
    more = {"step": values["step"], "world_size": values["world_size"], "files": files}
    write_settings(checkpoint, values["facts"], **more)


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("kind", ["metadata", "host", "rank", "tensor"])
def test_a_forged_checkpoint_runs_nothing(
    run: Path, tmp_path: Path, kind: str, digests: bool
) -> None:
    newest, marker = published(run)[-1], tmp_path / "marker"
    forge(newest, kind, marker)
    if not digests:
        without_digests(newest)
    for word in ("auto", str(newest)):
        with pytest.raises(UserError) as error:
            resume(run, word)
        file = newest / (METADATA if kind == "metadata" else "state")
        assert str(error.value) == (
            f"resume: '{file}' asks for posix.system; expected a checkpoint of qfsdp"
        )
    assert not marker.exists()
    torch.load(newest / "state" / "forged.distcp", weights_only=False) if kind != "metadata" else (
        pickle.loads((newest / METADATA).read_bytes())
    )
    assert marker.exists(), "the file was harmless"


@pytest.mark.parametrize(
    "names", ["builtins.eval", "torch.load", "torch.serialization.os.system", "pathlib.Path"]
)
def test_metadata_may_name_few_classes(run: Path, names: str) -> None:
    module, _, name = names.partition(".") if "os." not in names else names.rpartition(".os.")
    metadata = published(run)[-1] / METADATA
    if "os." in names:
        name = f"os.{name}"
    # Protocol 4: two strings, then STACK_GLOBAL, which also follows dots in names.
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
    metadata.write_bytes(b"\x80\x04" + texts + b"\x93.")
    without_digests(metadata.parent.parent)
    with pytest.raises(UserError, match=f"asks for {re.escape(names)}; expected a checkpoint"):
        resume(run)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_other_versions_of_python_read_it(run: Path, module: str) -> None:
    """Python 3.13 alone says that PosixPath is in `pathlib._local`."""
    metadata = published(run)[-1] / METADATA
    stored = pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=2)
    changed = re.sub(rb"cpathlib\S*\nPosixPath", f"c{module}\nPosixPath".encode(), stored)
    assert b"PosixPath" in changed
    metadata.write_bytes(changed)
    without_digests(metadata.parent.parent)
    resume(run)


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd"])
def test_metadata_may_not_name_files_elsewhere(run: Path, path: str) -> None:
    newest = published(run)[-1]
    stored = pickle.loads((newest / METADATA).read_bytes())
    for info in stored.storage_data.values():
        info.relative_path = path
    (newest / METADATA).write_bytes(pickle.dumps(stored))
    without_digests(newest)
    with pytest.raises(UserError, match=f".metadata names the file '{path}'"):
        resume(run, str(newest))


def test_the_named_path_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("x" * 300, "file/step_00000001", "a\0b"):
        with pytest.raises(UserError, match="^resume: '") as error:
            find_checkpoints(str(tmp_path / name), tmp_path / "run")
        assert "\n" not in str(error.value)
    long = tmp_path / ("x" * 300)
    with pytest.raises(UserError, match="^output_dir: '.*' cannot be read: File name too long$"):
        find_checkpoints("auto", long)
