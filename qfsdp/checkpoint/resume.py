"""Checkpoints of a run, and resuming from one.

    <output_dir>/checkpoints/step_00000040/
        state/        torch.distributed.checkpoint: trained tensors, optimizer, schedule, random
                      states
        adapter/      the adapters in PEFT's format, if adapters are trained
        facts.json    the step, the settings that a resumed run must share
                      (`qfsdp.checkpoint.compatibility`), and a digest of every file

A checkpoint is written as `step_00000040.partial` and renamed once every byte of it is on disk, so
a folder with its final name is complete. `.partial` folders are incomplete. A checkpoint that was
damaged later is named `step_00000040.damaged` once a run has gone on from an older one.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qfsdp.checkpoint.choose import (
    FOLDER,
    Choice,
    check_resume,
    find_checkpoints,
    published,
    set_aside,
    step_of,
)
from qfsdp.checkpoint.compatibility import settings_of_machines, write_settings
from qfsdp.checkpoint.digests import describe_file
from qfsdp.checkpoint.lock import FolderLock, check_shared
from qfsdp.checkpoint.model_card import publish
from qfsdp.checkpoint.publish import Publisher
from qfsdp.checkpoint.state import (
    Stager,
    TrainState,
    restore,
    trained_tensors,
)
from qfsdp.checkpoint.state_files import (
    UnsafeFile,
    read_host,
    read_trained,
    read_verified,
    reason,
    write_state,
)
from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.files import PARTIAL, sync, sync_folder, warn_of_space
from qfsdp.common.long_waits import long_wait
from qfsdp.common.progress import phase
from qfsdp.common.sealed import Damaged
from qfsdp.common.terminal import say, warn
from qfsdp.distributed.world import Numbers, World
from qfsdp.launch.signals import to_number, who_asks
from qfsdp.modules.low_rank.linear import refresh_dora_norms

Export = Callable[[dict[str, Tensor], Path], None]
"""Writes whole trained tensors, by name, to a new folder within a checkpoint."""

__all__ = ["CheckpointConfig", "Checkpointer", "TrainState", "check_resume", "published"]

# A single process saves without a process group; DCP would warn at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass
class CheckpointConfig:
    """Section `checkpoint`: when to save. The end of a run is always saved.

    Fields:
        every_n_steps: save after this many updates, or null.
        every_minutes: save after this many minutes, or null. Both may be set.
        keep_last: number of checkpoints to keep; older ones go after a newer one is complete.
        on_failure: after a failed save (a full disk), "stop" ends the run with an error and
            "continue" prints a warning.
        asynchronous: write in the background; false: training waits for the write.
        publish: a folder that gets the adapter of every checkpoint, `step_000100/` in PEFT's
            format, and a link `latest` to the newest, for a server that serves it; or null.
        publish_last: number of published adapters to keep.
    """

    every_n_steps: int | None = None
    every_minutes: float | None = 15.0
    keep_last: int = 2
    on_failure: Literal["stop", "continue"] = "stop"
    asynchronous: bool = True
    publish: str | None = None
    publish_last: int = 3

    @property
    def during_training(self) -> bool:
        """Whether a run saves before its end."""
        return self.every_n_steps is not None or self.every_minutes is not None

    def check(self) -> None:
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise InvalidField("every_minutes", self.every_minutes, "a number above 0, or null")
        if self.publish == "":  # the working directory, which may hold other things
            raise InvalidField("publish", self.publish, "the path of a folder, or null")
        check_bounds(self, "every_n_steps", "keep_last", "publish_last", least=1)


# ---- saving and loading --------------------------------------------------------------------------


class Checkpointer:
    """Saves and loads the checkpoints of one run. Every rank creates one and calls its methods.

    Rank 0 creates and locks `output_dir` (`FolderLock`), which all machines must see, and removes
    incomplete checkpoints of killed runs.

    Args:
        export: writes more files into every checkpoint (`adapter_export`), or None.

    Attributes:
        saved_step: of the run's last checkpoint that was begun or loaded, and has not failed; 0
            without one.
    """

    def __init__(
        self, config: CheckpointConfig, output_dir: Path, world: World, export: Export | None = None
    ) -> None:
        self._config, self._world, self._export = config, world, export
        self._output_dir, self._folder = output_dir, output_dir / FOLDER
        self._lock = self._publisher = None
        if world.rank == 0:
            self._lock = FolderLock(output_dir, "output_dir")
            if config.publish is not None:
                self._publisher = Publisher(Path(config.publish).expanduser(), config.publish_last)
            for path in self._folder.glob(f"step_*{PARTIAL}"):
                shutil.rmtree(path, ignore_errors=True)
        check_shared(output_dir, "output_dir", world)
        # A separate group: on the training group, background collectives would interleave with
        # those of the loop in a different order on every rank. gloo, as the copies are on the CPU.
        self._group = None
        if world.mesh is not None:
            self._group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.staging = Stager(world)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._saved_at = time.monotonic()
        self._settings: dict[str, Any] = {}
        self._choice = Choice()
        self.saved_step = self._written_step = 0  # the second is complete

    @long_wait("resume: looking for checkpoints")
    def find(self, resume: str | None, settings: Callable[[], dict[str, Any]]) -> Path | None:
        """The checkpoint to resume from, found by rank 0; None for a new run.

        Args:
            settings: computes the settings of this run, which its checkpoints record; called on
                rank 0, and once on every other machine.

        Raises:
            UserError: see `settings_of_machines`, `find_checkpoints` and `check_settings`.
        """
        self._settings = settings_of_machines(settings, self._world)
        if self._world.rank == 0:
            self._choice = find_checkpoints(resume, self._output_dir)
            for line in self._choice.check(self._settings):
                say(f"resume: {line}")
        self._choice = self._world.broadcast(self._choice)
        return next(iter(self._choice.folders), None)

    @long_wait("resume: reading and verifying the checkpoint")
    def load(self, folder: Path | None, state: TrainState) -> int:
        """Loads a checkpoint into `state`; returns its step number, or 0 for None.

        If it is damaged, loads the newest intact one that `find` has found, says so, and sets the
        damaged one aside. Nothing of a file reaches `state` before its digest is compared. Raises
        UserError: it is damaged and there is no other, or it cannot be read."""
        self._warn_of_space(state)
        if folder is None:
            return 0
        choice = self._choice if folder in self._choice.folders else Choice(folders=[folder])
        while True:
            folder = choice.folders[0]
            try:
                facts, read = read_verified(folder, state.model, self._world)
                break
            except Damaged as error:
                choice.drop(folder, str(error))
        if self._world.rank == 0:
            self._report(choice, facts)
        try:
            restore(read, state, self._world)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"resume: '{folder}' does not fit: {reason(error)}; expected a checkpoint of the "
                "same model and optimizer"
            ) from error
        refresh_dora_norms(state.model)
        if folder.parent.resolve() == self._folder.resolve():
            self.saved_step = self._written_step = int(facts["step"])
            if self._world.rank == 0:
                self._after_rename(int(facts["step"]), folder)
        return int(facts["step"])

    def _report(self, choice: Choice, facts: dict[str, Any]) -> None:
        """Says which damaged checkpoints are newer than the chosen one, and sets them aside."""
        chosen = choice.folders[0]
        lines = []
        for folder, how in choice.newest_first():
            if step_of(folder) > step_of(chosen):
                kept = f"; {set_aside(folder)}" if folder.parent == self._folder else ""
                lines.append(f"'{folder}' is damaged: {how}{kept}; going on from '{chosen.name}'")
        if "files" not in facts:
            old = f"'{chosen}' has no digests (of an earlier version)"
            lines.append(f"{old}: it cannot be verified")
        for line in lines:
            warn(f"resume: {line}")

    def _warn_of_space(self, state: TrainState) -> None:
        """Warns if the disk has no room for a checkpoint and the result, which every run writes."""
        if self._world.rank == 0:
            size = sum(t.numel() * t.element_size() for t in trained_tensors(state.model).values())
            copies = 2 if self._export is None else 3  # in state/, in its adapter/, in the result
            warn_of_space("output_dir", self._output_dir, copies * size)

    def agree(self, step: int, stop: object, others: Numbers | None = None) -> tuple[bool, bool]:
        """After each step: whether to stop (if any rank wants to), and whether to save.

        One exchange of the hosts, so that all ranks stop and save at the same step.

        Args:
            stop: the signal that asks this rank to stop (`StopRequest.received`), or None.
            others: whose numbers the ranks exchange with it.

        Raises:
            UserError: the last save has failed, and `on_failure` is "stop".
        """
        minutes, steps = self._config.every_minutes, self._config.every_n_steps
        waited = time.monotonic() - self._saved_at
        done = self._saving is not None and self._saving.done()
        failed: int = done and self._error() is not None
        flags = [to_number(stop), failed, minutes is not None and waited > 60 * minutes]
        of_ranks = self._world.exchange(*flags, *(others.numbers() if others else ()))
        asked, failed, late = (int(max(flag)) for flag in of_ranks[: len(flags)])
        if others is not None:
            others.take(of_ranks[len(flags) :])
        if failed:
            self._report_failure()
        if asked and self._world.rank == 0:
            text = f"saving after step {step}, then stopping; resume=auto continues from there"
            print(f"{who_asks(asked)}{text}", file=sys.stderr, flush=True)
        return asked > 0, late > 0 or (steps is not None and step % steps == 0)

    @phase("checkpoint save")
    @long_wait("saving a checkpoint")
    def save(self, step: int, state: TrainState) -> None:
        """Copies `state` and writes the copy in the background; waits for an earlier save first.

        On SmolLM2 with DoRA (59 MB, two ranks on two cores) a rank waits 20 ms for the copy, and
        the background write takes 30 ms of its core (rank 0: 60 ms): 1.5 to 2.4 % of a step of
        3.4 s. Steps after a save took as long as others (3.36 and 3.45 s of 3.25 to 3.45).
        Digests and the search for numbers that are not finite add 1.4 to 1.9 s of a core per GB
        to the background write, and nothing to the copy.
        """
        self.wait()
        self._saved_at, self.saved_step = time.monotonic(), step
        entries = self.staging.copy(state, step)
        copied = None
        if self._world.device.type != "cpu":
            copied = torch.get_device_module(self._world.device).Event()
            copied.record()
        self._saving = self._thread.submit(self._write, step, entries, copied)
        if not self._config.asynchronous:
            self.wait()

    @phase("checkpoint save")
    def wait(self) -> None:
        """Waits for the save in progress, if any. Raises as `agree` does."""
        if self._saving is not None and self._world.max(self._error() is not None):
            self._report_failure()
        self._saving, self._written_step = None, self.saved_step

    @long_wait("saving what is trained")
    def save_result(self, save: Callable[[Path], None], folder: Path, cfg: Any = None) -> None:
        """Writes what a run has trained to `folder`, at its end, with a card. Every rank must call
        it.

        Args:
            cfg: the recipe's config, for `publish`; None: no card.

        Raises:
            UserError: it cannot be written. The message names the newest checkpoint, for which it
                waits.
        """
        try:
            save(folder)
            if cfg is not None:
                publish(cfg, folder, self._world)
        except UserError as error:
            with suppress(UserError):  # the same full disk
                self.wait()
            raise UserError(f"{error}; {_intact(self._output_dir)}") from None

    @long_wait("waiting for the last checkpoint to be written")
    def close(self) -> None:
        """Waits for the save in progress and unlocks `output_dir`."""
        self.wait()
        self._thread.shutdown()
        if self._publisher is not None:
            self._publisher.close()
        if self._lock is not None:
            self._lock.release()

    def _write(self, step: int, entries: dict[str, Any], copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        final = self._folder / f"step_{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            written = write_state(partial / "state", entries, self._world, self._group)
            if self._world.rank == 0:
                self._complete(step, partial, final, written)
        except BaseException:  # CheckpointException is no Exception
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _complete(self, step: int, partial: Path, final: Path, written: dict[str, Any]) -> None:
        """Completes and renames the checkpoint, and deletes old ones; on rank 0, after all ranks
        have written.

        Args:
            written: size and digest of the files that are hashed already.
        """
        try:
            # Read from the files, not gathered from other ranks: this also checks the files.
            if self._export is not None:
                self._export(read_trained(partial / "state"), partial)
            else:
                read_host(partial / "state")
        except UnsafeFile as error:  # a later run could not resume
            expected = "numbers, texts and tensors"
            raise UserError(
                f"the optimizer or the schedule holds a {error.asks_for}; expected {expected}"
            ) from None
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        names = [str(path.relative_to(partial)) for path in paths]
        files = {name: written.get(name) or describe_file(partial / name) for name in names}
        more = {"world_size": self._world.size, "torch": torch.__version__}
        write_settings(partial, self._settings, step=step, files=files, **more)
        sync_folder(partial)
        partial.rename(final)
        sync(self._folder)
        self._after_rename(step, final)

    def _after_rename(self, step: int, final: Path) -> None:
        """Publishes the adapter of the newest checkpoint, and deletes old checkpoints. Done again
        by a run that resumes from it: the one before may have been killed after the rename."""
        if self._publisher is not None and (final / "adapter").is_dir():
            self._publisher.publish(step, final / "adapter")
        for old in published(self._output_dir)[: -self._config.keep_last]:
            old = old.rename(old.with_name(old.name + PARTIAL))  # the deletion may be interrupted
            shutil.rmtree(old, ignore_errors=True)

    def _error(self) -> BaseException | None:
        """The error of the last save, or None; waits for it."""
        return self._saving.exception() if self._saving is not None else None

    def _report_failure(self) -> None:
        error, self._saving = self._error(), None
        self.saved_step = self._written_step
        intact = _intact(self._output_dir)
        message = f"checkpoint: not written to '{self._folder}': {reason(error)}; {intact}"
        if self._config.on_failure == "stop":
            raise UserError(message)
        if self._world.rank == 0:
            warn(message)


def _intact(output_dir: Path) -> str:
    """What a user still has after a failed write."""
    newest = next(iter(published(output_dir)[::-1]), None)
    return f"'{newest}' is intact" if newest else "there is no earlier checkpoint"
