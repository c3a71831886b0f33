"""Reads and checks the values of one object of a `config.json`."""

from __future__ import annotations

import math
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import MOST_LAYERS

_MOST = {"num_hidden_layers": MOST_LAYERS, "max_position_embeddings": 2**31 - 1}
_MOST_SIZE = 2**24  # of all others


class NotComputed(UserError):
    """What a `config.json` says is right, and our decoder does not compute it."""


class Values:
    """The keys of one object of a `config.json`.

    Every method raises `UserError`, which names `source`, key and value, if the value is not as
    expected. A key with the value null counts as missing, except in `given` and `switch`.

    Args:
        values: the parsed object.
        source: names the file in errors.
        defaults: Hugging Face's values for keys that the file leaves out.
    """

    def __init__(self, values: dict[str, Any], source: str, **defaults: Any) -> None:
        self.source, self._values, self._defaults = source, values, defaults

    def given(self, name: str) -> Any:
        """The value, null included, or the family's default, or None."""
        return self._values.get(name, self._defaults.get(name))

    def size(self, name: str, default: int | None = None) -> int:
        value, most = self._or(name, default), _MOST.get(name, _MOST_SIZE)
        if type(value) is not int or value < 1:
            raise self.error(name, value, "a positive integer")
        if value > most:
            raise self.error(name, value, f"at most {most}")
        return value

    def count(self, name: str) -> int:
        value = self.given(name)
        if type(value) is not int or value < 0:
            raise self.error(name, value, "an integer of at least 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value: Any = self._or(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(name, value, "a number above 0")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        value = self.given(name)
        valid = isinstance(value, list) and len(value) == count
        if not valid or not all(type(x) in (int, float) and 0 < x < math.inf for x in value):
            raise self.error(name, value, f"{count} numbers above 0")
        return tuple(float(x) for x in value)

    def switch(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name, self._defaults.get(name, default))
        if type(value) is not bool:
            raise self.error(name, value, "true or false")
        return value

    def only(self, name: str, expected: Any, absent: Any = None) -> None:
        """Raises `NotComputed` for every value but `expected`. A missing key means `absent` or,
        without one, `expected`."""
        value = self.given(name)
        if value is None:
            value = expected if absent is None else absent
        if value != expected:
            wanted = repr(expected) if isinstance(expected, str) else str(expected).lower()
            error = self.error(name, value, "null" if expected is None else wanted)
            raise NotComputed(str(error))

    def first_of(self, names: tuple[str, ...], default: str) -> str:
        """The first of several names of one key that the file has, else `default`."""
        return next((name for name in names if name in self._values), default)

    def object(self, name: str) -> dict[str, Any]:
        value = self.given(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return value

    def of_layers(self, name: str, kinds: tuple[Any, ...]) -> list[Any] | None:
        """One of `kinds` for every layer, or None where the key is missing."""
        value, count = self.given(name), self.size("num_hidden_layers")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or any(x not in kinds for x in value):
            if isinstance(value, list) and len(value) >= count:
                value = next(x for x in value if x not in kinds)
            known = " or ".join(str(kind) for kind in kinds)
            raise self.error(name, value, f"{known} for each of {count} layers")
        return value[:count]

    def error(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.source}: {name} is {value!r}; expected {expected}")

    def _or(self, name: str, default: Any) -> Any:
        value = self.given(name)
        return default if value is None else value
