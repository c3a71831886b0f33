"""One writer per output folder."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from types import TracebackType

from qfsdp.cli.errors import UserError

LOCK_FILE = ".lock"


class FolderLock:
    """The right to write a folder, which is made if it is missing; a context manager.

    It ends with `release`, with this object, or with the process, however that dies: the kernel
    holds the lock (`flock`). The file stays, empty of meaning without a process behind it.

    Args:
        folder: may be missing.
        key: the config key that names the folder, for the messages.

    Raises:
        UserError: another process has the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / LOCK_FILE, "a+")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"{key}: '{folder}' cannot be written: {error}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"{key}: '{folder}' is being written by {holder}; wait for its end, or give "
                f"another {key}"
            ) from None
        except OSError as error:  # some network file systems have no locks
            print(f"warning: {key}: '{folder}' cannot be locked: {error}", file=sys.stderr)
            return
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Lets others write the folder."""
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
