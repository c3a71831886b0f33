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
from qfsdp.distributed.exchange import World

LOCK_FILE = ".lock"
SEEN_S = 90  # a network file system may remember for a minute that something was not there
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


def check_shared(folder: Path, key: str, world: World) -> None:
    """Checks that every machine sees what rank 0 writes to a folder. Without this check, the first
    checkpoint of a run failed after a quarter of an hour. Raises UserError on every rank."""
    if world.size == world.local_size:
        return
    mark = folder / world.broadcast(f".seen-{os.getpid()}-{time.time_ns()}")
    if world.rank == 0:
        with writing(key, folder):
            mark.touch()
    world.sum(0)  # a barrier
    ended = time.monotonic() + SEEN_S
    with long_wait(f"{key}: waiting until this machine sees the file {mark.name} of rank 0"):
        while not mark.exists() and time.monotonic() < ended:
            time.sleep(_LOOK_S)
    seen = world.exchange(mark.exists())[0]
    if world.rank == 0:
        mark.unlink(missing_ok=True)
    if 0 in seen:
        other = f"is another folder on the machine of rank {seen.index(0)} than on that of rank 0"
        raise UserError(f"{key}: '{folder}' {other}; expected storage that all machines see")
