"""The two ways in which qfsdp tells a user that something they wrote is wrong."""

from __future__ import annotations

from typing import Any

USER_ERROR_STATUS = 2  # exit status of a process that ends with a UserError


class UserError(Exception):
    """A user's mistake, told in one line: the key or file, the value, what would be right.

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
