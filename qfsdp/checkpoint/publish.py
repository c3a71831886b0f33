"""Adapters published while a run trains, for a server that serves the newest one.

    <checkpoint.publish>/
        step_000100/      a folder in PEFT's format, with the chat template if it has one
        step_000200/
        latest            -> step_000200, a symbolic link

A folder is written as `.step_000200.partial`, synced and renamed, and then `latest` is replaced by
another link in one step (rename(2)). So every name that a server can see is complete at any time,
also after a kill or on a full disk. What a killed run has left half written is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from qfsdp.checkpoint.choose import step_of
from qfsdp.checkpoint.lock import FolderLock
from qfsdp.common.files import PARTIAL, not_written, sync, sync_folder
from qfsdp.common.terminal import warn

LATEST = "latest"
KEY = "checkpoint.publish"
_NAME = re.compile(r"step_\d{6,}")


class Publisher:
    """Publishes the adapters of one run to a folder, which it creates and locks.

    Args:
        folder: of `checkpoint.publish`.
        keep: number of adapters to keep, the latest among them.

    Raises:
        UserError: another process publishes there, or the folder cannot be written.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._lock = FolderLock(folder, KEY)
        for path in folder.glob(f".*{PARTIAL}"):
            _remove(path)

    def publish(self, step: int, adapter: Path) -> None:
        """Copies `adapter` to `step_<step>`, makes it the latest, and deletes the oldest. If that
        fails, prints one line: the run goes on, and the next checkpoint is published again.

        Copies nothing if it is the latest already."""
        final = self._folder / f"step_{step:06d}"
        partial = final.with_name(f".{final.name}{PARTIAL}")
        link = self._folder / f".{LATEST}{PARTIAL}"
        try:
            if self._is_latest(final, adapter):
                self._delete_old(step)  # what a kill may have left
                return
            _remove(partial)
            partial.mkdir()
            for file in adapter.iterdir():
                shutil.copyfile(file, partial / file.name)
            sync_folder(partial)
            self._hide(final)  # if an earlier run has published this step
            partial.rename(final)
            _remove(link)
            link.symlink_to(final.name)
            link.replace(self._folder / LATEST)
            sync(self._folder)
            self._delete_old(step)
        except OSError as error:
            warn(f"{KEY}: {not_written(final, error)}; training goes on")
            _remove(partial)

    def close(self) -> None:
        """Unlocks the folder."""
        self._lock.release()

    def _is_latest(self, final: Path, adapter: Path) -> bool:
        """Whether `latest` is this step's folder, with the same files."""
        latest = self._folder / LATEST
        if not (latest.is_symlink() and os.readlink(latest) == final.name and final.is_dir()):
            return False
        return {f.name: f.read_bytes() for f in final.iterdir()} == {
            f.name: f.read_bytes() for f in adapter.iterdir()
        }

    def _delete_old(self, newest: int) -> None:
        """Deletes all but the last. Their order is that of the steps, as a clock may be set back;
        steps after the newest are of an earlier run that went on to them, so they come first."""
        found = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        found.sort(key=lambda path: (step_of(path) <= newest, step_of(path)))
        for old in found[: -self._keep]:
            self._hide(old)

    def _hide(self, folder: Path) -> None:
        """Deletes a folder, if it is there, in one step for those who see its name."""
        if folder.exists():
            hidden = folder.with_name(f".{folder.name}.old{PARTIAL}")
            _remove(hidden)
            _remove(folder.rename(hidden))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
