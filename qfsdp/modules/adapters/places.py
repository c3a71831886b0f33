"""Where adapters stand: the linears that `adapter.targets`, `layers` and `exclude` select.

Names match as in PEFT (`check_target_module_exists` and `get_pattern_key` of its tuners): a pattern
matches a whole name, an entry of a list the end of a name from a dot on, and a key of
`rank_pattern` or `alpha_pattern` is an expression for such an end. Two things PEFT does not have:
`layers` goes with "all-linear" and with a pattern, and a word alone is a name, also without a list.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from torch import nn

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.modules.targets import (
    ALL_LINEAR,
    adapted_modules,
    check_present,
    check_targets,
    linears_of,
    target_modules,
)

_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")  # the first number in a name


def is_pattern(targets: str | list[str]) -> bool:
    """Whether `targets` is a regular expression, and not a name, a list or a list without []."""
    return isinstance(targets, str) and re.search(r"[^\w\s,-]", targets) is not None


def check_pattern(key: str, pattern: str) -> None:
    """Raises `UserError` unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        expected = "expected a regular expression"
        raise UserError(f"{key}: {pattern!r} is no pattern ({error}); {expected}") from None


def ends_with(pattern: str, name: str) -> bool:
    """Whether a key of `rank_pattern` or `alpha_pattern` stands for a linear."""
    return _end(pattern).match(name) is not None


@cache
def _end(pattern: str) -> re.Pattern[str]:
    # `re` keeps 512 patterns. With one for each linear of 126 layers it compiled 400,000 times.
    return re.compile(rf"(.*\.)?({pattern})$")


def check_places(
    targets: str | list[str], layers: str | list[int] | None, exclude: str | list[str] | None
) -> None:
    """Checks the form of the three fields. Raises `UserError` or `InvalidField`."""
    for key, chosen in (("adapter.targets", targets), ("adapter.exclude", exclude)):
        if is_pattern(chosen or ""):
            check_pattern(key, str(chosen))
        elif chosen is not None:
            words = [chosen] if isinstance(chosen, str) else chosen
            plain = [word for word in words if "." not in word]
            if plain or not words:
                check_targets(key, plain, few_rows=True)
    if layers is None:
        return
    expected = 'a range such as "0-15", or a list of different indices of at least 0'
    numbers = _numbers(layers)
    if not numbers or min(numbers) < 0 or len(numbers) > len(set(numbers)):
        raise InvalidField("layers", layers, expected)


def _numbers(layers: str | list[int]) -> list[int]:
    """The indices of `adapter.layers`; none if it is no range."""
    if isinstance(layers, list):
        return layers
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", layers)
    return list(range(int(found[1]), int(found[2] or found[1]) + 1)) if found else []


def layer_of(name: str) -> int | None:
    """The layer that a linear stands in; None: in no layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


Places = list[tuple[str, nn.Module]]
"""(name, module) of linears, in model order."""


def adapted_places(model: nn.Module, config: Any, kind: tuple[type[nn.Module], ...]) -> Places:
    """The linears of type `kind` that an `AdapterConfig` selects. Raises UserError: a name, a
    pattern or a layer stands for no linear of the model."""
    places, words = _places(model, kind), _words(config.linears)
    plain = [word for word, pattern in words if not pattern and "." not in word]
    check_present("adapter.targets", plain, model, few_rows=True)
    named = {name for name, _ in adapted_modules(model, plain, kind)}
    longer = [(word, pattern) for word, pattern in words if word not in plain]
    found = [(n, m) for n, m in places if n in named or any(_matches(*w, n) for w in longer)]
    if config.layers is not None:
        numbers = _layers_of(config.layers, places)
        found = [(name, module) for name, module in found if layer_of(name) in numbers]
    for word, pattern in words:
        if not any(_matches(word, pattern, name) for name, _ in found):
            raise _no_match(config, word, pattern, places)
    excluded = _words(config.exclude or [])
    for word, pattern in excluded:
        if not any(_matches(word, pattern, name) for name, _ in found):
            selected = "matches no linear that adapter.targets and adapter.layers select"
            raise UserError(f"adapter.exclude: {word!r} {selected}; expected some of them")
    found = [(n, m) for n, m in found if not any(_matches(*word, n) for word in excluded)]
    if not found:
        raise UserError(f"adapter.exclude: {config.exclude!r} leaves no linear; expected fewer")
    for key in ("rank_pattern", "alpha_pattern"):
        for end in getattr(config, key) or ():
            if not any(ends_with(end, name) for name, _ in found):
                expected = f"expected the end of a name such as {found[0][0]!r}"
                raise UserError(f"adapter.{key}: {end!r} matches no adapted linear; {expected}")
    return found


def _places(model: nn.Module, kind: tuple[type[nn.Module], ...]) -> Places:
    """Every linear of a model that may have an adapter."""
    kept = getattr(model, "not_adapted", ())
    names = [*linears_of(model, few_rows=True)]
    return [(n, m) for n, m in target_modules(model, names, kind) if n not in kept]


def _words(chosen: str | list[str]) -> list[tuple[str, bool]]:
    """(word, whether it is a pattern) of `targets` or `exclude`."""
    if isinstance(chosen, str):
        return [(chosen, is_pattern(chosen))]
    return [(word, False) for word in chosen]


def _matches(word: str, pattern: bool, name: str) -> bool:
    if pattern:
        return re.fullmatch(word, name) is not None
    return word == ALL_LINEAR or f".{name}".endswith(f".{word}")


def _no_match(config: Any, word: str, pattern: bool, places: Places) -> UserError:
    expected = f"a pattern of whole names such as {places[0][0]!r}"
    if not pattern:
        expected = f"names, or ends of names such as {places[0][0]!r}"
        if re.search(r"[^\w.-]", word):
            expected += ", or one pattern without a list"
    where = f" with adapter.layers: {config.layers}" if config.layers is not None else ""
    return UserError(
        f"adapter.targets: {word!r}{where} matches no linear of this model; expected {expected}"
    )


def _layers_of(layers: str | list[int], places: Places) -> set[int]:
    """The indices of `adapter.layers`, which the model has."""
    numbers = set(_numbers(layers))
    most = max((n for name, _ in places if (n := layer_of(name)) is not None), default=-1)
    if max(numbers) > most:
        expected = f"expected 0 to {most}"
        raise UserError(f"adapter.layers: {max(numbers)} is not a layer of this model; {expected}")
    return numbers
