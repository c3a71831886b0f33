"""A lock that gives every output folder one writer."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from qfsdp.common.errors import UserError
from qfsdp.common.files import why, writing
from qfsdp.common.long_waits import long_wait
from qfsdp.common.progress import moved
from qfsdp.common.terminal import say, warn

LOCK_FILE = ".lock"
_LOOK_S = 0.2


class FolderLock:
    """Locks a folder for writing, and creates it if it is missing; a context manager.

    The lock ends with `release`, with this object, or with the process, even a killed one: the
    kernel holds it (`flock`). The lock file stays; without a process it locks nothing.

    Args:
        folder: may be missing.
        key: the config key that names the folder, for messages.
        wait: wait for another process that holds the lock, and say so.

    Raises:
        UserError: another process holds the lock and `wait` is false, or the folder cannot be
            written.
    """

    def __init__(self, folder: Path, key: str, wait: bool = False) -> None:
        with writing(key, folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / LOCK_FILE, "a+")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            if wait:
                self._wait(folder, key, holder)
                return
            self._file.close()
            raise UserError(
                f"{key}: '{folder}' is being written by {holder}; wait for its end, or set another "
                f"{key}"
            ) from None
        except OSError as error:  # some network file systems have no locks
            warn(f"{key}: '{folder}' cannot be locked: {why(error)}")
            return
        self._sign()

    def _wait(self, folder: Path, key: str, holder: str) -> None:
        """Waits until `holder` is done. What it writes keeps the watchdog from ending this run."""
        say(f"{key}: '{folder}' is being written by {holder}; waiting for it ...")
        with long_wait(f"{key}: waiting for {holder}"):
            seen: object = None
            while True:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOOK_S)
                if (now := _changes(folder)) != seen:
                    seen = now
                    moved()
        self._sign()

    def _sign(self) -> None:
        descriptor = self._file.fileno()
        with suppress(OSError):  # a full disk: the folder is locked, only without a name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Unlocks the folder."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _changes(folder: Path) -> list[tuple[str, int, int]]:
    """What changes in a folder while it is written."""
    found = []
    for entry in os.scandir(folder):
        with suppress(OSError):
            status = entry.stat()
            found.append((entry.name, status.st_blocks, status.st_mtime_ns))
    return sorted(found)
