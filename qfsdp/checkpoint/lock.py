"""A lock that gives every output folder one writer."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from qfsdp.cli.errors import UserError
from qfsdp.cli.files import not_written, why

LOCK_FILE = ".lock"


class FolderLock:
    """Locks a folder for writing, and creates it if it is missing; a context manager.

    The lock ends with `release`, with this object, or with the process, even a killed one: the
    kernel holds it (`flock`). The lock file stays; without a process it locks nothing.

    Args:
        folder: may be missing.
        key: the config key that names the folder, for messages.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / LOCK_FILE, "a+")  # noqa: SIM115
            descriptor = self._file.fileno()
        except OSError as error:
            raise UserError(f"{key}: {not_written(folder, error)}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"{key}: '{folder}' is being written by {holder}; wait for its end, or set another "
                f"{key}"
            ) from None
        except OSError as error:  # some network file systems have no locks
            print(f"warning: {key}: '{folder}' cannot be locked: {why(error)}", file=sys.stderr)
            return
        with suppress(OSError):  # a full disk: the folder is locked, only without a name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Unlocks the folder."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
