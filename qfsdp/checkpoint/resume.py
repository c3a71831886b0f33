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

from qfsdp.checkpoint.compatibility import FACTS_FILE, check_facts, read_facts, write_facts
from qfsdp.checkpoint.lock import FolderLock
from qfsdp.checkpoint.state import Staging, TrainState, read_trained, restore
from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import refresh_dora_norms

Export = Callable[[dict[str, Tensor], Path], None]
"""Writes trained tensors, by name and whole, to a folder of its own within a checkpoint's."""

AUTO = "auto"
FOLDER = "checkpoints"
PARTIAL = ".partial"

# One process saves without a process group, which is not worth a warning at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass
class CheckpointConfig:
    """Section `checkpoint`: how much work a failure may cost. The end of a run is always saved.

    Fields:
        every_n_steps: save after each so many updates, or null.
        every_minutes: save after so many minutes, or null. Both may be given.
        keep_last: how many to keep; older ones are deleted once a newer one is complete.
        on_failure: what a save that fails (a full disk) does to the run: "stop" ends it with
            an error, "continue" with a warning.
        asynchronous: write in the background; false holds training up until all is written.
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


# ---- which one -----------------------------------------------------------------------------


def published(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [
        path
        for path in (output_dir / FOLDER).glob("step_*")
        if re.fullmatch(r"step_\d{8,}", path.name) and (path / FACTS_FILE).is_file()
    ]
    return sorted(found, key=_step_of)


def find_checkpoint(resume: str | None, output_dir: Path) -> Path | None:
    """The checkpoint that a run goes on from; None if it starts anew.

    Args:
        resume: null, "auto" (the newest in `output_dir`, if there is one), a checkpoint's
            folder, or another run's output_dir, which means its newest.

    Raises:
        UserError: there is no such checkpoint, or `output_dir` has checkpoints that the run would
            mix its own with.
    """
    own = published(output_dir)
    if resume is None and own:
        raise UserError(
            f"output_dir: '{output_dir}' has checkpoints, up to step {_step_of(own[-1])}; set "
            "resume=auto to go on from there, or another output_dir"
        )
    if resume is None or (resume == AUTO and not own):
        return None
    if resume == AUTO:
        return own[-1]
    path = Path(resume).expanduser()
    inside = published(path)
    if not (path / FACTS_FILE).is_file() and not inside:
        raise UserError(
            f"resume: '{resume}' is no checkpoint and has none; expected auto, a folder such as "
            f".../{FOLDER}/step_00000040, or an output_dir with checkpoints"
        )
    found = inside[-1] if inside else path
    if own and own[-1].resolve() != found.resolve():
        raise UserError(
            f"resume: '{found}' is not where '{output_dir}' stopped, which is step "
            f"{_step_of(own[-1])}; set resume=auto to go on from there, or another output_dir"
        )
    return found


def check_resume(resume: str | None, output_dir: str, facts: Callable[[], dict[str, Any]]) -> None:
    """The preflight of `Checkpointer.find`, with what is known of the facts so far; they are
    not asked for where the run starts anew."""
    found = find_checkpoint(resume, Path(output_dir).expanduser())
    if found is not None:
        check_facts(facts(), found)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


# ---- saving and going on ---------------------------------------------------------------------


class Checkpointer:
    """The checkpoints of one run. Every rank makes one, and calls the same methods.

    Rank 0 locks `output_dir` (see FolderLock), which it makes if need be, and removes what killed
    runs have left half-written.

    Args:
        export: writes what every checkpoint has beside its state (`adapter_export`), if anything.
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
        # Its own group: on training's, collectives of the background would come between those of
        # the loop, in another order on every rank. And what it talks about is on the CPU.
        self._group = dist.new_group(backend="gloo") if world.mesh is not None else None
        self._staging = Staging(world)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._saved_at = time.monotonic()
        self._facts: dict[str, Any] = {}

    def find(self, resume: str | None, facts: Callable[[], dict[str, Any]]) -> Path | None:
        """The checkpoint to go on from, as rank 0 sees it; None for a start from nothing.

        Args:
            facts: of this run; they will stand in its checkpoints. Only rank 0 asks for them.

        Raises:
            UserError: see `find_checkpoint`, `check_facts`.
        """
        found = None
        if self._world.rank == 0:
            self._facts = facts()
            found = find_checkpoint(resume, self._output_dir)
            if found is not None:
                check_facts(self._facts, found)
        return self._world.broadcast(found)

    def load(self, folder: Path | None, state: TrainState) -> int:
        """Puts a checkpoint into `state`; returns the number of steps that it has behind it."""
        if folder is None:
            return 0
        written = read_facts(folder)
        try:
            restore(folder / "state", written["world_size"], state, self._world)
        except (OSError, dcp.CheckpointException) as error:
            raise UserError(f"resume: '{folder}' cannot be read: {_reason(error)}") from None
        refresh_dora_norms(state.model)
        return int(written["step"])

    def agree(self, step: int, stop: object) -> tuple[bool, bool]:
        """After each step: whether to stop, as any rank may have been told; whether to save.

        One all-reduce, without which ranks would stop and save at different steps.

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
            self._tell_failure()
        if stop and self._world.rank == 0:
            text = f"saving after step {step}, then stopping; resume=auto goes on from there"
            print(text, file=sys.stderr, flush=True)
        return stop, late or (steps is not None and step % steps == 0)

    def save(self, step: int, state: TrainState) -> None:
        """Copies `state` and writes it in the background; waits for an earlier save first.

        On SmolLM2 with DoRA (59 MB, two ranks on two cores) the copy holds a rank up for 20 ms,
        and the background takes 30 ms of its core (rank 0: 60 ms): 1.5 to 2.4 % of a step of
        3.4 s. The steps after a save were as long as the others (3.36 and 3.45 s of 3.25 to 3.45).
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
        """Until nothing is being written. Raises as `agree` does."""
        if self._saving is not None and self._any([self._error() is not None])[0]:
            self._tell_failure()
        self._saving = None

    def close(self) -> None:
        """Waits, and gives `output_dir` free."""
        self.wait()
        self._thread.shutdown()
        if self._lock is not None:
            self._lock.release()

    def _any(self, flags: list[bool]) -> list[bool]:
        """Each flag, true where it is on any rank."""
        if self._world.mesh is None:
            return flags
        total = torch.tensor(flags, dtype=torch.float32, device=self._world.device)
        dist.all_reduce(total)
        return [number > 0 for number in total.tolist()]

    # ---- in the background

    def _write(self, step: int, entries: dict[str, Any], copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        final = self._folder / f"step_{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            # No copying ahead: DCP would wait for this thread's stream, on device 0.
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
        except BaseException:  # DCP's are no Exception
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _publish(self, step: int, partial: Path, final: Path) -> None:
        """Rank 0, once all ranks have written: the rest, the name, and what it replaces."""
        if self._export is not None:
            # From the files and not from other ranks: so they have been read once, too.
            self._export(read_trained(partial / "state"), partial)
        write_facts(
            partial, self._facts, step=step, world_size=self._world.size, torch=torch.__version__
        )
        sync_folder(partial)
        partial.rename(final)
        _sync(self._folder)
        for old in published(self._output_dir)[: -self._config.keep_last]:
            old = old.rename(old.with_name(old.name + PARTIAL))  # half of it is none
            shutil.rmtree(old, ignore_errors=True)

    # ---- failures

    def _error(self) -> BaseException | None:
        """Why the last save has failed; waits for it."""
        return self._saving.exception() if self._saving is not None else None

    def _tell_failure(self) -> None:
        error, self._saving = self._error(), None
        newest = next(iter(published(self._output_dir)[::-1]), None)
        intact = f"'{newest}' is intact" if newest else "there is no earlier one"
        message = f"checkpoint: not written to '{self._folder}': {_reason(error)}; {intact}"
        if self._config.on_failure == "stop":
            raise UserError(message)
        if self._world.rank == 0:
            print(f"warning: {message}", file=sys.stderr, flush=True)


class _Writer(dcp.FileSystemWriter):
    """Tells why a file could not be written, where `torch.save` says "unexpected pos 704 vs 598".

    Here, because exceptions lose what they come from on their way to other ranks.
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
    """Puts a folder on disk, and before it all that is in it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
