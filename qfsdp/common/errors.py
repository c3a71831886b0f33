"""Mistakes of a user: their two exceptions, and how a process ends after one."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

from qfsdp.common.printable import printable, redacted

MOST_INTEGER = 2**63 - 1  # of torch
# Words of the linker, the C library, PyTorch and Python's threads.
_NO_ADDRESS_SPACE = ("failed to map segment", "allocate memory", "start new thread")
_NO_THREAD = ("can't start new thread", "resource temporarily unavailable")
NEEDS_UTF8 = "expected a locale with UTF-8, or PYTHONUTF8=1"
USER_ERROR_STATUS = 2  # exit status of a process that ends with a UserError

# All ranks usually meet the same mistake. Rank 0 reports it at once, and torchrun then ends the
# others. On a busy machine torchrun may be late. So another rank waits for this many seconds, and
# then reports its mistake, unless a rank of this machine has reported the same one.
_RANK_0_GOES_FIRST_S = 2.0


class UserError(Exception):
    """A user's mistake in one line: `<key or file>: <value> ...; expected ...`.

    Several mistakes in one config are a line each. Recipes print each line as `error: <line>` and
    exit with status 2, without a traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """What notebooks (IPython) show in place of a traceback."""
        return error_lines(str(self))


def error_lines(text: str, prefix: str = "") -> list[str]:
    """The message of a UserError as it is shown, a line for each mistake."""
    return [f"error: {prefix}{line}" for line in text.split("\n")]


class InvalidField(ValueError):
    """A config section's own check failed; `qfsdp.config.load` adds the section's name.

    Raised from the `check()` method of a config dataclass:
    `raise InvalidField("rank", self.rank, "an integer of at least 1")` in section
    `adapter` becomes `adapter.rank: -1 is not valid; expected an integer of at least 1`.
    """

    def __init__(self, field: str, value: Any, expected: str) -> None:
        super().__init__(f"{field}: {shortened(repr(value))} is not valid; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


def check_bounds(section: Any, *names: str, least: int, most: int = MOST_INTEGER) -> None:
    """Checks that the named integer fields of a config section lie from `least` to `most`; null is
    allowed where a field's type has it. Raises InvalidField."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not least <= value <= most:
            bound = f"an integer of at {f'least {least}' if value < least else f'most {most}'}"
            may_be_null = type(None) in get_args(get_type_hints(type(section)).get(name))
            raise InvalidField(name, value, bound + ", or null" * may_be_null)


def shortened(text: str, most: int = 300) -> str:
    """`text`, without its middle if it has more than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def speaks_for_all() -> bool:
    """Whether this process prints what concerns all ranks: it is rank 0, or no rank."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns a UserError into `error: <message>` on stderr and exit status 2.

    A limit of the system is one too, wherever it is met: on names of files, on address space.
    """
    try:
        with limits_of_the_system():
            yield
    except UserError as error:
        rank, text = os.environ.get("RANK", "0"), printable(redacted(str(error)))
        if rank != "0":
            time.sleep(_RANK_0_GOES_FIRST_S)
        sys.stdout.flush()
        if not _is_told(text):
            prefix = "" if rank == "0" else f"rank {rank}: "
            print(*error_lines(text, prefix), sep="\n", file=sys.stderr, flush=True)
        if "LOCAL_RANK" in os.environ:
            # A normal exit can abort in gloo's threads, see `ranks.leave_process_group`.
            os._exit(USER_ERROR_STATUS)
        raise SystemExit(USER_ERROR_STATUS) from None


@contextmanager
def interrupts() -> Iterator[None]:
    """After an unhandled Ctrl-C, ends the process by SIGINT, without a traceback.

    Python does so too, unless a function at exit calls `exec`, as packages do that torch imports if
    they are installed. Then the status would be 1, a failure.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _is_told(text: str) -> bool:
    """Whether another rank of this machine has printed the same error; if not, this one does."""
    if (own := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return False
    # A folder of all ranks that torchrun's agent has started at once.
    mark = Path(own).parent.parent / f"told_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        mark.touch(exist_ok=False)
    except OSError as error:
        return isinstance(error, FileExistsError)
    return False


@contextmanager
def limits_of_the_system() -> Iterator[None]:
    """Raises UserError where the system's error says that one of its limits is met."""
    try:
        yield
    except (OSError, UnicodeEncodeError, MemoryError, ImportError, RuntimeError) as error:
        if (met := _limit(error)) is None:
            raise
        raise UserError(met) from None
    except ValueError as error:
        if (name := refused_variable(error)) is None:
            raise
        given = f"{name}: {shortened(repr(os.environ[name]))} in the environment"
        reason = shortened(" ".join(str(error).split()), 150)
        raise UserError(f"{given}; expected a value that its package reads ({reason})") from None


def refused_variable(error: BaseException) -> str | None:
    """The variable of the environment whose value made the import of a package fail, or None. Its
    name stands in the message, or in one of the last lines of code."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    if not any(frame.name == "<module>" for frame in frames):
        return None  # no import
    lines = [str(error), *(frame.line or "" for frame in frames[-4:])]
    words = re.findall(r"\w+", "\n".join(lines))
    return next((word for word in words if "_" in word and word in os.environ), None)


def _limit(error: Exception) -> str | None:
    """The limit that an error has met: of names of files, of threads, or of address space."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = shortened(str(error.filename))
        return f"{name}: {error.strerror}; expected at most 255 bytes per name"
    if isinstance(error, UnicodeEncodeError):
        locale = sys.getfilesystemencoding()
        if locale != "utf-8" and error.encoding == locale:
            return f"{ascii(shortened(error.object))}: no name in {locale}; {NEEDS_UTF8}"
    size = resource.getrlimit(resource.RLIMIT_AS)[0]
    text = str(error).lower()
    full = isinstance(error, MemoryError) or any(word in text for word in _NO_ADDRESS_SPACE)
    if full and size != resource.RLIM_INFINITY:
        most = f"ulimit -v: {size >> 10} KiB of address space are used up"
        return f"{most} ({shortened(str(error) or 'MemoryError', 100)}); expected `unlimited`"
    if isinstance(error, RuntimeError) and any(word in text for word in _NO_THREAD):
        count = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        given = "unlimited" if count == resource.RLIM_INFINITY else str(count)
        return (
            f"no thread can be started; expected more than `ulimit -u` ({given}), or pids.max of "
            "the container, allows"
        )
    return None
