"""What a user has got wrong: two exceptions, and how the process ends after one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

USER_ERROR_STATUS = 2  # exit status of a process that ends with a UserError

# All ranks usually meet the same mistake. Rank 0 reports it at once and torchrun then ends the
# others; a rank that is still alive after this many seconds has met a mistake that rank 0 has not.
_RANK_0_GOES_FIRST_S = 2.0


class UserError(Exception):
    """A user's mistake in one line: `<key or file>: <value> ...; expected ...`.

    Recipes print it as `error: <message>` and exit with status 2, without a traceback.
    """


class InvalidField(ValueError):
    """A config section's own check failed; `qfsdp.cli.config` adds the section's name.

    Raised from the `check()` method of a config dataclass:
    `raise InvalidField("rank", self.rank, "an integer of at least 1")` in section
    `adapter` becomes `adapter.rank: -1 is not valid; expected an integer of at least 1`.
    """

    def __init__(self, field: str, value: Any, expected: str) -> None:
        super().__init__(f"{field}: {value!r} is not valid; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns a UserError into `error: <message>` on stderr and exit status 2."""
    try:
        yield
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_RANK_0_GOES_FIRST_S)
        prefix = "" if rank == "0" else f"rank {rank}: "
        sys.stdout.flush()
        print(f"error: {prefix}{error}", file=sys.stderr, flush=True)
        if "LOCAL_RANK" in os.environ:
            # A normal exit can abort in gloo's threads, see `ranks.leave_process_group`.
            os._exit(USER_ERROR_STATUS)
        raise SystemExit(USER_ERROR_STATUS) from None
