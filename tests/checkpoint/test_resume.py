"""Checkpoints: their content, completeness, and failing saves."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qfsdp.checkpoint import lock
from qfsdp.checkpoint.adapter_files import adapter_export
from qfsdp.checkpoint.choose import find_checkpoints, published
from qfsdp.checkpoint.compatibility import settings_of_machines, write_settings
from qfsdp.checkpoint.lock import LOCK_FILE, FolderLock
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer
from qfsdp.checkpoint.state_files import HashingFileSystem
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.distributed.world import init_world
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.training.metrics import RunLog
from tests.json_lines import json_lines, metric_lines
from tests.models import adapted_model, build_meta_model, cpu_world, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import ROOT, write_tiny_model
from tests.waiting import LIMIT_S

ADAPTER = AdapterConfig(rank=2, alpha=4.0)  # A has fewer rows than there are ranks
pytestmark = pytest.mark.usefixtures("eager")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.SGD": {},
    "torch.optim.SGD ": {"momentum": 0.9},
    "torch.optim.AdamW": {"fused": True},
    "torch.optim.AdamW ": {"amsgrad": True},
    "torch.optim.NAdam": {},
    "torch.optim.RMSprop": {"centered": True, "momentum": 0.5},
    "torch.optim.Adagrad": {},
    "torchao.optim.AdamW8bit": {},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@lru_cache(2)
def tiny_model(folder: Path, bits: int) -> Any:
    # torchao uses 8 bits for tensors of at least 4096 numbers on a rank, if 256 divides them: of
    # two ranks the second alone does for B of up_proj.
    large = AdapterConfig(rank=64, targets=["q_proj", "up_proj"])
    return adapted_model(folder, large if bits == 8 else ADAPTER)


@pytest.fixture(autouse=True)
def compile_again() -> Iterator[None]:
    """`train_state` turns the compiler off; turns it on again."""
    yield
    torch.compiler.set_stance("default")


def train_state(model_dir: Path, kind: str = "torch.optim.AdamW", **more: Any) -> Any:
    """A sharded model with random adapters, an optimizer and a schedule."""
    from qfsdp.checkpoint.state import TrainState
    from qfsdp.config.component import Component
    from qfsdp.distributed.gradients import trainable_parameters
    from qfsdp.modules.adapters.linears import init_adapters

    torch.compiler.set_stance("force_eager")  # AdamW8bit compiles its update
    model = tiny_model(model_dir, 8 if "8bit" in kind else 32)
    init_adapters(model, seed=0)
    randomize_adapters(model)
    component = Component(kind.strip(), {"lr": 0.01, **more})
    optimizer = component.build(trainable_parameters(model))
    return TrainState(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def take_steps(state: Any, steps: range) -> None:
    """Updates with gradients that depend on the step and the whole tensor's row only."""
    from qfsdp.checkpoint.adapter_files import adapter_parameters
    from qfsdp.tensor_subclasses.dtensor import local_part, local_rows

    for step in steps:
        for at, param in enumerate(adapter_parameters(state.model).values()):
            generator = torch.Generator().manual_seed(1000 * step + at)
            noise = torch.randn(param.shape, generator=generator)[local_rows(param)]
            param.grad = torch.zeros_like(param)
            local_part(param.grad).copy_(noise)
        state.optimizer.step()
        state.scheduler.step()


def whole(state: Any) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint must restore, gathered; this rank's rows of torchao's states."""
    from qfsdp.checkpoint.adapter_files import adapter_parameters
    from qfsdp.tensor_subclasses.dtensor import local_part, whole_tensor

    found = {"lr": torch.tensor(float(state.optimizer.param_groups[0]["lr"]))}
    for name, param in adapter_parameters(state.model).items():
        found[name] = whole_tensor(param).clone()
        for field, value in state.optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                rows = local_part(value)
                eight_bit = type(rows) is not torch.Tensor
                of_torchao = type(state.optimizer).__module__.startswith("torchao.")
                value = (
                    rows.dequantize() if eight_bit else rows if of_torchao else whole_tensor(value)
                )
                found[f"{name} {field}"] = value.clone()
    return found


def checkpointer(folder: Path, **config: Any) -> Checkpointer:
    export = adapter_export(ADAPTER, "base")
    made = Checkpointer(CheckpointConfig(**config), folder, cpu_world(), export)
    made.find("auto", dict)
    return made


def save_three(model_dir: Path, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Saves after 3 updates, for every optimizer; returns the state then and after 3 more."""
    results = []
    for at, (kind, more) in enumerate(OPTIMIZERS.items()):
        state = train_state(model_dir, kind, **more)
        saver = checkpointer(folder / str(at))
        take_steps(state, range(3))
        saver.save(3, state)
        torch.manual_seed(at)
        then = whole(state)
        take_steps(state, range(3, 6))
        saver.close()
        results.append({"then": then, "later": whole(state)})
    return results


def load_three(model_dir: Path, folder: Path) -> list[Any]:
    results = []
    for at, (kind, more) in enumerate(OPTIMIZERS.items()):
        state = train_state(model_dir, kind, **more)
        saver = checkpointer(folder / str(at))
        try:
            assert saver.load(saver.find("auto", dict), state) == 3
        except UserError as error:
            results.append(str(error))
            continue
        finally:
            saver.close()
        then = whole(state)
        take_steps(state, range(3, 6))
        results.append({"then": then, "later": whole(state)})
    return results


@pytest.fixture(scope="module")
def saved(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Number of ranks -> folder and state of their checkpoints."""
    os.environ["QFSDP_EAGER_KERNELS"] = "1"
    folders = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (1, 2)}
    return {n: (f, run_ranks(n, save_three, model_dir, f)) for n, f in folders.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*n, marks=[] if n == (2, 1) else pytest.mark.long)
        for n in ((1, 1), (2, 2), (2, 1), (1, 3))
    ],
)
def test_every_number_comes_back(
    model_dir: Path, saved: dict[int, Any], before: int, after: int
) -> None:
    """Adapters and optimizer states, also on more ranks than an adapter has rows. On as many ranks
    as before, training continues bit for bit."""
    folder, by_rank = saved[before]
    for rank, results in enumerate(run_ranks(after, load_three, model_dir, folder)):
        saves = by_rank[rank if before == after else 0]
        for kind, expected, found in zip(OPTIMIZERS, saves, results, strict=True):
            if kind == "torchao.optim.AdamW8bit" and before != after:
                assert f"that only {before} ranks can read; expected as many, not {after}" in found
                continue
            assert found["then"].keys() == expected["then"].keys(), kind
            for name, value in expected["then"].items():
                assert torch.equal(found["then"][name], value), f"{kind}: {name}"
            for name, value in expected["later"].items():
                # Vectorized kernels round the last few of a rank's numbers differently.
                close = torch.equal if before == after else partial(torch.allclose, atol=1e-6)
                assert close(found["later"][name], value), f"{kind}: {name}, later"


# ---- content ---------------------------------------------------------------------------------


def test_the_adapter_is_there_in_pefts_format(model_dir: Path, tmp_path: Path) -> None:
    from qfsdp.checkpoint.adapter_files import adapter_parameters, load_adapter

    state, saver = train_state(model_dir), checkpointer(tmp_path)
    take_steps(state, range(2))
    saver.save(2, state)
    saver.close()
    (folder,) = published(tmp_path)
    expected = adapter_parameters(state.model)
    file = folder / "adapter" / "adapter_model.safetensors"
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], param) for name, param in expected.items())
    assert not any("_orig_mod" in name or "_fsdp" in name for name in found)
    numbers = sum(param.numel() for param in expected.values())
    assert 4 * numbers < file.stat().st_size < 4 * numbers + 200 * len(expected)
    load_adapter(state.model, folder / "adapter")


def test_neither_base_nor_norms_are_saved_and_entries_are_few(
    model_dir: Path, tmp_path: Path
) -> None:
    """Few entries make a save cheap (see state.py): their number must not grow with the model's
    depth, nor the bytes with the base."""
    from qfsdp.checkpoint.adapter_files import adapter_parameters
    from qfsdp.checkpoint.state import Stager, TrainState

    state = train_state(model_dir)
    take_steps(state, range(1))
    numbers = sum(param.numel() for param in adapter_parameters(state.model).values())
    entries = Stager(cpu_world()).copy(state, 1)
    tensors = [e for e in entries.values() if isinstance(e, torch.Tensor)]
    assert len(entries) == len(tensors) + 2
    steps = len(adapter_parameters(state.model))
    assert sum(t.numel() for t in tensors) == 3 * numbers + steps

    deep = write_tiny_model(tmp_path, num_hidden_layers=7)
    deep_state = TrainState(
        build_meta_model(deep, adapter=ADAPTER).to_empty(device="cpu"),
        *[state.optimizer, state.scheduler],
    )
    shallow = Stager(cpu_world()).copy(TrainState(state.model, state.optimizer, None), 1)
    adapters = [key for key in shallow if key.startswith("trained")]
    assert [k for k in Stager(cpu_world()).copy(deep_state, 1) if k.startswith("trained")] == (
        adapters
    )


def test_a_save_copies_the_state_and_does_not_delay_training(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state changes during a slow write; only one save runs at a time."""
    import torch.distributed.checkpoint as dcp

    write, active, most, slow = dcp.FileSystemWriter.write_data, [0], [0], threading.Event()

    def write_slowly(self: Any, *args: Any) -> Any:
        active[0] += 1
        most[0] = max(most[0], active[0])
        assert slow.wait(LIMIT_S)
        active[0] -= 1
        return write(self, *args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_slowly)
    state, saver = train_state(model_dir), checkpointer(tmp_path, keep_last=9)
    moments = []
    take_steps(state, range(1))
    saver.save(1, state)
    moments.append(whole(state))
    take_steps(state, range(1, 2))
    assert published(tmp_path) == [], "it was not written in the background"
    assert saver.agree(2, False) == (False, False)
    threading.Timer(0.5, slow.set).start()
    saver.save(2, state)  # waits for the first save
    assert slow.is_set() and published(tmp_path)[0].name == "step_00000001"
    moments.append(whole(state))
    take_steps(state, range(2, 4))
    saver.close()
    assert most == [1]
    for step, (folder, expected) in enumerate(zip(published(tmp_path), moments, strict=True), 1):
        again = train_state(model_dir)
        take_steps(again, range(9))
        assert checkpointer(tmp_path / f"{step}").load(folder, again) == step
        for name, value in whole(again).items():
            assert torch.equal(value, expected[name]), f"step {step}: {name}"


def test_old_and_incomplete_checkpoints_are_removed(model_dir: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / "step_00000007.partial"
    (leftover / "state").mkdir(parents=True)
    state, saver = train_state(model_dir), checkpointer(tmp_path, keep_last=2, asynchronous=False)
    assert not leftover.exists()
    for step in (1, 2, 10, 11):
        saver.save(step, state)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["step_00000010", "step_00000011"]


def test_when_saves_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = checkpointer(tmp_path / "a", every_minutes=None)
    assert [never.agree(step, None) for step in (1, 2)] == [(False, False)] * 2
    steps = checkpointer(tmp_path / "b", every_n_steps=3)
    assert [steps.agree(step, None)[1] for step in range(1, 7)] == [False, False, True] * 2
    now = [1000.0]
    monkeypatch.setattr("qfsdp.checkpoint.resume.time.monotonic", lambda: now[0])
    minutes = checkpointer(tmp_path / "c", every_minutes=0.5)
    now[0] += 29
    assert minutes.agree(1, None) == (False, False)
    now[0] += 2
    assert minutes.agree(2, None) == (False, True)
    assert minutes.agree(3, "SIGTERM") == (True, True)


@pytest.mark.parametrize(
    ("field", "value"), [("every_n_steps", 0), ("every_minutes", 0.0), ("keep_last", 0)]
)
def test_config_mistakes(field: str, value: float) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: {value} is not valid; expected "):
        CheckpointConfig(**{field: value}).check()


# ---- which checkpoint ------------------------------------------------------------------------


def make_checkpoint(output_dir: Path, step: int) -> Path:
    folder = output_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    write_settings(folder, {}, step=step, world_size=1)
    return folder


def test_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    run, other, empty = tmp_path / "run", tmp_path / "other", tmp_path / "empty"
    old, new = make_checkpoint(run, 9), make_checkpoint(run, 100_000_000)  # nine digits
    foreign = make_checkpoint(other, 5)
    (run / "checkpoints" / "step_00000200.partial").mkdir()
    assert published(run) == [old, new]
    assert find_checkpoints("auto", run).folders == [new, old]
    assert not find_checkpoints("auto", empty).folders
    assert not find_checkpoints(None, empty).folders
    for resume in (foreign, other):
        assert find_checkpoints(str(resume), empty).folders == [foreign]
    assert find_checkpoints(str(run), run).folders == [new, old]
    assert find_checkpoints(str(new), run).folders == [new]

    def error(resume: Any, output_dir: Path) -> str:
        with pytest.raises(UserError) as raised:
            find_checkpoints(None if resume is None else str(resume), output_dir)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    both = "expected resume=auto to continue it, or another output_dir"
    assert error(None, run) == (
        f"output_dir: '{run}' has checkpoints, up to step 100000000; {both}"
    )
    for resume in (foreign, old):  # checkpoints of two runs must not be mixed
        assert error(resume, run).endswith(both)
    assert "is no checkpoint and contains none" in error(tmp_path / "nowhere", empty)


# ---- failures --------------------------------------------------------------------------------


WHERE = ("rank 0", "rank 1", "adapter")


def fail(model_dir: Path, folder: Path, on_failure: str) -> list[list[str]]:
    """Saves at steps 1, 2 (fails as on a full disk) and 3; returns the messages."""
    import torch.distributed.checkpoint as dcp

    from qfsdp.checkpoint import adapter_files as export

    state, results = train_state(model_dir), []
    write, write_adapter = dcp.FileSystemWriter.write_data, export.write_adapter

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for where in WHERE:
        saver = checkpointer(folder / where, on_failure=on_failure, keep_last=9)
        messages = []
        for step in (1, 2, 3):
            if step == 2 and where == f"rank {cpu_world().rank}":
                dcp.FileSystemWriter.write_data = full  # type: ignore[method-assign]
            if step == 2 and where == "adapter":
                export.write_adapter = full  # type: ignore[assignment]
            try:
                take_steps(state, range(step, step + 1))
                saver.save(step, state)
                while saver._saving is not None and not saver._saving.done():
                    time.sleep(0.01)
                saver.agree(step, False)
            except UserError as error:
                messages.append(f"{step}: {error}")
            dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]
            export.write_adapter = write_adapter
        saver.close()
        left = sorted(path.name for path in (folder / where / "checkpoints").iterdir())
        results.append([*messages, *left])
    return results


@pytest.mark.parametrize("on_failure", [pytest.param("stop", marks=pytest.mark.long), "continue"])
def test_a_failed_save_leaves_the_earlier_checkpoint_only(
    model_dir: Path, tmp_path: Path, on_failure: str, capfd: pytest.CaptureFixture[str]
) -> None:
    messages, of_rank_1 = run_ranks(2, fail, model_dir, tmp_path, on_failure)
    errors = capfd.readouterr().err.splitlines()
    for at, where in enumerate(WHERE):
        folder = tmp_path / where / "checkpoints"
        message = (
            f"checkpoint: not written to '{folder}': No space left on device; "
            f"'{folder}/step_00000001' is intact"
        )
        intact = ["step_00000001", "step_00000003"]
        if on_failure == "stop":
            assert messages[at] == [f"2: {message}", *intact]
            assert of_rank_1[at][0].startswith("2: checkpoint: not "), "ranks stop together"
        else:
            assert messages[at] == of_rank_1[at] == intact
            assert errors.count(f"warning: {message}") == 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.checkpoint.test_resume import checkpointer, take_steps, train_state
state, saver = train_state(Path(sys.argv[1])), checkpointer(Path(sys.argv[2]), asynchronous=False)
saver.save(1, state)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # limits files to 20 kB: EFBIG
take_steps(state, range(3))
saver.save(2, state)
"""


@pytest.mark.long
def test_a_full_disk(model_dir: Path, tmp_path: Path) -> None:
    """The kernel refuses a write in the middle of a file."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, model_dir, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "QFSDP_EAGER_KERNELS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (
        f"'{tmp_path}/checkpoints': File too large; '{tmp_path}/checkpoints/step_00000001' is "
        in (done.stderr.splitlines()[-1])
    )
    (intact,) = (tmp_path / "checkpoints").iterdir()
    assert checkpointer(tmp_path).load(intact, train_state(model_dir)) == 1


# ---- lock and log ----------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from qfsdp.checkpoint.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "output_dir")
print("held", flush=True)
time.sleep(600)
"""


def test_one_process_writes_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    words = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError) as error:
            FolderLock(folder, "output_dir")
        assert str(error.value).startswith(
            f"output_dir: '{folder}' is being written by process {other.pid} on "
        )
        assert str(error.value).endswith("; wait for its end, or set another output_dir")
        other.kill()
        other.wait()
    with FolderLock(folder, "output_dir"):
        assert f"process {os.getpid()} on" in (folder / LOCK_FILE).read_text()
        with pytest.raises(UserError, match="is being written by process"):
            FolderLock(folder, "output_dir")
    FolderLock(folder, "output_dir").release()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="^output_dir: .*/file/run' cannot be written: "):
        FolderLock(tmp_path / "file" / "run", "output_dir")


def test_a_resumed_run_truncates_the_log_to_its_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.5}) for step in range(1, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    log = RunLog(tmp_path, None, 3, 8)
    log.log(4, {"loss": 0.25})
    log.close()
    steps = json_lines(file)
    assert [(entry["step"], entry["loss"]) for entry in steps] == [
        *((step, 0.5) for step in (1, 2, 3)),
        (4, 0.25),
    ]


FULL_LOG = """
import resource, sys
from pathlib import Path
from qfsdp.training.metrics import RunLog
log = RunLog(Path(sys.argv[1]), None, 0, 3)
log.log(1, {"loss": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
log.log(2, {"loss": 2.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
log.log(3, {"loss": 3.0})
log.close()
"""


@pytest.mark.long
def test_a_temporarily_full_disk_loses_no_log_line(tmp_path: Path) -> None:
    """A failed checkpoint, which was removed, must not end the run through its log."""
    words = [sys.executable, "-c", FULL_LOG, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2, 3]


def test_a_checkpoint_from_before_fp8_was_trained_in_bf16(tmp_path: Path) -> None:
    from qfsdp.checkpoint.compatibility import check_settings, write_settings

    before = {"quantization.format": "nf4"}
    write_settings(tmp_path, before, step=3, world_size=1)
    check_settings(before | {"quantization.compute": "bf16"}, tmp_path)
    with pytest.raises(UserError, match="quantization.compute: was bf16, is fp8; expected"):
        check_settings(before | {"quantization.compute": "fp8"}, tmp_path)


def on_two_machines(folder: Path, shared: bool) -> list[str]:
    """What two ranks say of output_dir, each on a machine of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    world = init_world()
    own = folder if shared else folder / str(world.rank)
    own.mkdir(exist_ok=True)
    lock.SEEN_S = 0 if not shared else 60
    try:
        Checkpointer(CheckpointConfig(), own, world)
    except UserError as error:
        return [str(error)]
    return sorted(path.name for path in own.iterdir() if path.name != LOCK_FILE)


@pytest.mark.parametrize("shared", [True, False])
def test_machines_that_do_not_share_the_folder(tmp_path: Path, shared: bool) -> None:
    """The first save failed with "No such file", 15 minutes later."""
    for found in run_ranks(2, on_two_machines, tmp_path, shared):
        if shared:
            assert found == []
        else:
            assert "is another folder on the machine of rank 1 than on that of rank 0" in found[0]


def with_settings(of_ranks: list[dict[str, Any]]) -> str:
    """What a rank says of the settings of three machines."""
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    world = init_world()
    try:
        return str(settings_of_machines(lambda: of_ranks[world.rank], world))
    except UserError as error:
        return str(error)


def test_machines_with_other_settings() -> None:
    """Each trained its rows with its own learning rate; with fewer rows they hung."""
    same = {"optimizer.lr": 1e-3, "dataset (its length)": 26}
    assert run_ranks(3, with_settings, [same] * 3) == [str(same)] * 3
    for found in run_ranks(3, with_settings, [same, same, same | {"dataset (its length)": 20}]):
        where = "dataset (its length): 26 on rank 0, and 20 on the machine of rank 2"
        assert found == f"{where}; expected the same config and files on all machines"


def test_a_folder_that_another_rank_has_made_and_this_one_does_not_see_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    HashingFileSystem().mkdir(tmp_path)
