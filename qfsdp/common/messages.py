"""Parts of error messages about configs: types in words, similar names, keys."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Union, get_origin

from qfsdp.common.errors import UserError, shortened
from qfsdp.common.printable import masked, redacted

TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    types.NoneType: "null",
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar of the known words; None if none is similar."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def did_you_mean(near: str | None) -> str:
    return f"; did you mean '{near}'?" if near else ""


def not_valid(key: str, value: Any, expected: str) -> UserError:
    """The error for a key with a wrong value."""
    shown = masked({key.rpartition(".")[2]: value})[key.rpartition(".")[2]]
    return UserError(f"{key}: {redacted(shortened(repr(shown)))} is not valid; expected {expected}")


def required(key: str) -> UserError:
    """The error for a missing key."""
    return UserError(f"{key} is required; give it in the config file or as {key}=VALUE")


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def join_key(prefix: str, name: str) -> str:
    """ "section.name", or the name alone at the top of a config."""
    return f"{prefix}.{name}" if prefix else name


def flat(
    tree: Any, prefix: str = "", is_value: Callable[[Any], bool] = lambda value: False
) -> dict[str, Any]:
    """A tree of mappings as "section.name" -> value; {} for anything else.

    Args:
        is_value: whether a mapping is a value itself; an empty one always is.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        key, nested = join_key(prefix, str(name)), isinstance(value, dict) and bool(value)
        found |= flat(value, key, is_value) if nested and not is_value(value) else {key: value}
    return found


def is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)
