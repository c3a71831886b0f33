"""Checkpoints of a run, and resuming from one.

    <output_dir>/checkpoints/step_00000040/
        state/        torch.distributed.checkpoint: trained tensors, optimizer, schedule, random
                      states
        adapter/      the adapters in PEFT's format, if adapters are trained
        facts.json    the step, and the settings that a resumed run must share
                      (`qfsdp.checkpoint.compatibility`)

A checkpoint is written as `step_00000040.partial` and renamed once every byte of it is on disk, so
a folder with its final name is complete. `.partial` folders are incomplete.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from qfsdp.checkpoint.compatibility import (
    SETTINGS_FILE,
    check_settings,
    read_settings,
    write_settings,
)
from qfsdp.checkpoint.lock import FolderLock
from qfsdp.checkpoint.state import Stager, TrainState, read_trained, restore
from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import refresh_dora_norms

Export = Callable[[dict[str, Tensor], Path], None]
"""Writes whole trained tensors, by name, to a new folder within a checkpoint."""

AUTO = "auto"
FOLDER = "checkpoints"
PARTIAL = ".partial"

# A single process saves without a process group; DCP would warn at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass
class CheckpointConfig:
    """Section `checkpoint`: when to save. The end of a run is always saved.

    Fields:
        every_n_steps: save after this many updates, or null.
        every_minutes: save after this many minutes, or null. Both may be set.
        keep_last: number of checkpoints to keep; older ones are deleted after a newer one is
            complete.
        on_failure: after a failed save (a full disk), "stop" ends the run with an error and
            "continue" prints a warning.
        asynchronous: write in the background; false: training waits for the write.
    """

    every_n_steps: int | None = None
    every_minutes: float | None = 15.0
    keep_last: int = 2
    on_failure: Literal["stop", "continue"] = "stop"
    asynchronous: bool = True

    def check(self) -> None:
        if self.every_n_steps is not None and self.every_n_steps < 1:
            expected = "an integer of at least 1, or null"
            raise InvalidField("every_n_steps", self.every_n_steps, expected)
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise InvalidField("every_minutes", self.every_minutes, "a number above 0, or null")
        if self.keep_last < 1:
            raise InvalidField("keep_last", self.keep_last, "an integer of at least 1")


# ---- which checkpoint ----------------------------------------------------------------------------


def published(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [
        path
        for path in (output_dir / FOLDER).glob("step_*")
        if re.fullmatch(r"step_\d{8,}", path.name) and (path / SETTINGS_FILE).is_file()
    ]
    return sorted(found, key=_step_of)


def find_checkpoint(resume: str | None, output_dir: Path) -> Path | None:
    """The checkpoint to resume from; None for a new run.

    Args:
        resume: null, "auto" (the newest checkpoint in `output_dir`, if any), the folder of a
            checkpoint, or the output_dir of another run (its newest checkpoint).

    Raises:
        UserError: there is no such checkpoint, or `output_dir` has checkpoints of another run.
    """
    own = published(output_dir)
    if resume is None and own:
        raise UserError(
            f"output_dir: '{output_dir}' has checkpoints, up to step {_step_of(own[-1])}; "
            "expected resume=auto to continue it, or another output_dir"
        )
    if resume is None or (resume == AUTO and not own):
        return None
    if resume == AUTO:
        return own[-1]
    path = Path(resume).expanduser()
    inside = published(path)
    if not (path / SETTINGS_FILE).is_file() and not inside:
        raise UserError(
            f"resume: '{resume}' is no checkpoint and contains none; expected auto, a folder such "
            f"as .../{FOLDER}/step_00000040, or an output_dir with checkpoints"
        )
    found = inside[-1] if inside else path
    if own and own[-1].resolve() != found.resolve():
        raise UserError(
            f"resume: '{found}' is not the last checkpoint of '{output_dir}', which is step "
            f"{_step_of(own[-1])}; expected resume=auto to continue it, or another output_dir"
        )
    return found


def check_resume(
    resume: str | None, output_dir: str, settings: Callable[[], dict[str, Any]]
) -> None:
    """The preflight of `Checkpointer.find`.

    Args:
        settings: computes the settings that are known before data is read; not called for a new
            run.

    Raises:
        UserError: see `find_checkpoint` and `check_settings`.
    """
    found = find_checkpoint(resume, Path(output_dir).expanduser())
    if found is not None:
        check_settings(settings(), found)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


# ---- saving and loading --------------------------------------------------------------------------


class Checkpointer:
    """Saves and loads the checkpoints of one run. Every rank creates one and calls its methods.

    Rank 0 creates and locks `output_dir` (`FolderLock`), and removes incomplete checkpoints of
    killed runs.

    Args:
        export: writes more files into every checkpoint (`adapter_export`), or None.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        output_dir: Path,
        world: World,
        export: Export | None = None,
    ) -> None:
        self._config, self._world, self._export = config, world, export
        self._output_dir, self._folder = output_dir, output_dir / FOLDER
        self._lock = None
        if world.rank == 0:
            self._lock = FolderLock(output_dir, "output_dir")
            for path in self._folder.glob(f"step_*{PARTIAL}"):
                shutil.rmtree(path, ignore_errors=True)
        # A separate group: on the training group, background collectives would interleave with
        # those of the loop in a different order on every rank. gloo, as the copies are on the CPU.
        self._group = dist.new_group(backend="gloo") if world.mesh is not None else None
        self._staging = Stager(world)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._saved_at = time.monotonic()
        self._settings: dict[str, Any] = {}

    def find(self, resume: str | None, settings: Callable[[], dict[str, Any]]) -> Path | None:
        """The checkpoint to resume from, found by rank 0; None for a new run.

        Args:
            settings: computes the settings of this run, which its checkpoints record; called on
                rank 0 only.

        Raises:
            UserError: see `find_checkpoint` and `check_settings`.
        """
        found = None
        if self._world.rank == 0:
            self._settings = settings()
            found = find_checkpoint(resume, self._output_dir)
            if found is not None:
                check_settings(self._settings, found)
        return self._world.broadcast(found)

    def load(self, folder: Path | None, state: TrainState) -> int:
        """Loads a checkpoint into `state`; returns its step number, or 0 for None.

        Raises:
            UserError: it cannot be read.
        """
        if folder is None:
            return 0
        written = read_settings(folder)
        try:
            restore(folder / "state", written["world_size"], state, self._world)
        except (OSError, dcp.CheckpointException) as error:
            raise UserError(f"resume: '{folder}' cannot be read: {_reason(error)}") from None
        refresh_dora_norms(state.model)
        return int(written["step"])

    def agree(self, step: int, stop: object) -> tuple[bool, bool]:
        """After each step: whether to stop (if any rank wants to), and whether to save.

        One all-reduce, so that all ranks stop and save at the same step.

        Raises:
            UserError: the last save has failed, and `on_failure` is "stop".
        """
        minutes, steps = self._config.every_minutes, self._config.every_n_steps
        waited = time.monotonic() - self._saved_at
        done = self._saving is not None and self._saving.done()
        failed = done and self._error() is not None
        flags = [bool(stop), failed, minutes is not None and waited > 60 * minutes]
        stop, failed, late = self._any(flags)
        if failed:
            self._report_failure()
        if stop and self._world.rank == 0:
            text = f"saving after step {step}, then stopping; resume=auto continues from there"
            print(text, file=sys.stderr, flush=True)
        return stop, late or (steps is not None and step % steps == 0)

    def save(self, step: int, state: TrainState) -> None:
        """Copies `state` and writes the copy in the background; waits for an earlier save first.

        On SmolLM2 with DoRA (59 MB, two ranks on two cores) a rank waits 20 ms for the copy, and
        the background write takes 30 ms of its core (rank 0: 60 ms): 1.5 to 2.4 % of a step of
        3.4 s. Steps after a save took as long as others (3.36 and 3.45 s of 3.25 to 3.45).
        """
        self.wait()
        self._saved_at = time.monotonic()
        entries = self._staging.copy(state, step)
        copied = None
        if self._world.device.type != "cpu":
            copied = torch.get_device_module(self._world.device).Event()
            copied.record()
        self._saving = self._thread.submit(self._write, step, entries, copied)
        if not self._config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits for the save in progress, if any. Raises as `agree` does."""
        if self._saving is not None and self._any([self._error() is not None])[0]:
            self._report_failure()
        self._saving = None

    def close(self) -> None:
        """Waits for the save in progress and unlocks `output_dir`."""
        self.wait()
        self._thread.shutdown()
        if self._lock is not None:
            self._lock.release()

    def _any(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self._world.mesh is None:
            return flags
        total = torch.tensor(flags, dtype=torch.float32, device=self._world.device)
        dist.all_reduce(total)
        return [number > 0 for number in total.tolist()]

    def _write(self, step: int, entries: dict[str, Any], copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        final = self._folder / f"step_{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            # Without copy-ahead: DCP would wait for this thread's stream, on device 0.
            writer = _Writer(partial / "state", per_thread_copy_ahead=0)
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.save(
                entries,
                storage_writer=writer,
                planner=planner,
                process_group=self._group,
                no_dist=self._group is None,
            )
            if self._world.rank == 0:
                self._publish(step, partial, final)
        except BaseException:  # CheckpointException is no Exception
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _publish(self, step: int, partial: Path, final: Path) -> None:
        """Completes and renames the checkpoint, and deletes old ones; on rank 0, after all ranks
        have written."""
        if self._export is not None:
            # Read from the files, not gathered from other ranks: this also checks the files.
            self._export(read_trained(partial / "state"), partial)
        write_settings(
            partial, self._settings, step=step, world_size=self._world.size, torch=torch.__version__
        )
        sync_folder(partial)
        partial.rename(final)
        _sync(self._folder)
        for old in published(self._output_dir)[: -self._config.keep_last]:
            old = old.rename(old.with_name(old.name + PARTIAL))  # the deletion may be interrupted
            shutil.rmtree(old, ignore_errors=True)

    def _error(self) -> BaseException | None:
        """The error of the last save, or None; waits for it."""
        return self._saving.exception() if self._saving is not None else None

    def _report_failure(self) -> None:
        error, self._saving = self._error(), None
        newest = next(iter(published(self._output_dir)[::-1]), None)
        intact = f"'{newest}' is intact" if newest else "there is no earlier one"
        message = f"checkpoint: not written to '{self._folder}': {_reason(error)}; {intact}"
        if self._config.on_failure == "stop":
            raise UserError(message)
        if self._world.rank == 0:
            print(f"warning: {message}", file=sys.stderr, flush=True)


class _Writer(dcp.FileSystemWriter):
    """Raises the OSError behind a failed write; `torch.save` says "unexpected pos 704 vs 598".

    Done in the writer, because exceptions lose their cause on the way to other ranks.
    """

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _reason(error: BaseException | None) -> str:
    """The innermost cause in one line."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0] if error else "see rank 0"


def sync_folder(folder: Path) -> None:
    """Syncs everything in a folder to disk, then the folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
