"""Converts a tree of plain values to a dataclass schema and back, and explains unknown keys."""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qfsdp.common.errors import MOST_INTEGER, InvalidField, UserError
from qfsdp.common.messages import (
    TYPE_WORDS,
    did_you_mean,
    is_union,
    join_key,
    nearest,
    not_valid,
    required,
)
from qfsdp.config.component import Component, passed_by_name
from qfsdp.config.foreign_keys import answer_to, in_words
from qfsdp.config.right_forms import check_no_file


def onto_component(below: Any, above: Any) -> Any:
    """`above` over `below`, which may be a component's node.

    As in torchtune, a string names another component and keeps the arguments, and a mapping without
    `_component_` changes arguments only. Any other value replaces the node.
    """
    if isinstance(below, dict) and "_component_" in below:
        if isinstance(above, str):
            return {**below, "_component_": above}
        if isinstance(above, dict) and "_component_" not in above:
            return {**below, **above}
    return above


def defaults(schema: type) -> dict[str, Any]:
    """The schema's defaults as a plain tree; fields without a default are left out."""
    tree: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for entry in fields(schema):
        if entry.default is not MISSING:
            tree[entry.name] = plain_tree(entry.default)
        elif entry.default_factory is not MISSING:
            tree[entry.name] = plain_tree(entry.default_factory())
        elif (section := section_of(hints[entry.name])) is not None:
            tree[entry.name] = defaults(section)
    return tree


def overlay(schema: type, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: sections key by key, components as `onto_component`. A wrong value is
    taken as it is, such as a text in place of a section: `mistakes` reports it."""
    hints = get_type_hints(schema)
    # In the schema's order: interpolations are resolved in it, and the first error is reported.
    order = [name for name in hints if name in below or name in above]
    tree = {name: below.get(name) for name in order} | above
    for name in order:
        if name not in above:
            continue
        low, high, kind = below.get(name), above[name], hints[name]
        section = section_of(kind)
        if section is None:
            emptied = high is None and (get_origin(kind) or kind) is dict
            tree[name] = low if emptied else onto_component(low, high)
        elif isinstance(high, dict):
            tree[name] = overlay(section, low if low is not None else defaults(section), high)
        elif high is None and not is_union(kind):  # `adapter:` with every line commented out
            tree[name] = low
    return tree


COMPONENT_WORDS = "a mapping with _component_"
_PLURALS = {int: "integers", float: "numbers", str: "strings", dict: "mappings"}


def mistakes(root: type, kind: Any, value: Any, key: str = "") -> Iterator[str]:
    """Finds unknown keys, and values that should be sections, at any depth of a config. Yields one
    message for each. Interpolations may be unresolved.

    Args:
        root: the schema of the whole config. Messages propose its keys.
        kind: the type that the schema gives to `value`.
        value: a part of the config; at first all of it.
        key: the place of `value` in the config.
    """
    if is_union(kind) and section_of(kind) is None:
        shapes = [member for member in get_args(kind) if _takes_shape(member, value)]
        kind = shapes[0] if len(shapes) == 1 else None
    if (section := section_of(kind)) is not None:
        if isinstance(value, dict):
            hints, names = get_type_hints(section), section_names(section)
            unknown = [name for name in value if name not in names]
            yield from (_unknown(root, key, str(name), value[name], names) for name in unknown)
            for name in (name for name in value if name in names):
                yield from mistakes(root, hints[name], value[name], join_key(key, name))
        elif "${" not in str(value) and not (value is None and is_union(kind)):
            yield _no_section(section, value, key)
    elif isinstance(value, list) and (get_origin(kind) or kind) is list:
        for at, entry in enumerate(value):
            yield from mistakes(root, (*get_args(kind), Any)[0], entry, f"{key}[{at}]")
    elif isinstance(value, dict) and (get_origin(kind) or kind) is dict:
        for name, entry in value.items():
            yield from mistakes(root, (*get_args(kind), Any)[-1], entry, join_key(key, str(name)))


def section_names(schema: Any) -> list[str]:
    """The keys of a section, given by its schema or itself."""
    return [entry.name for entry in fields(schema) if entry.init]


def _no_section(schema: Any, value: Any, key: str) -> str:
    expected = f"a section with the keys {', '.join(section_names(schema))}"
    return f"{not_valid(key, value, expected)}{in_words(answer_to(key, value))}"


def build_section(schema: Any, tree: Any, prefix: str) -> Any:
    """Builds one section: checks names first, then values, then calls its `check()`."""
    names = section_names(schema)
    if not isinstance(tree, dict):
        raise UserError(_no_section(schema, tree, prefix))
    hints = get_type_hints(schema)
    # `mistakes` finds these names, except where a value may be one of several sections.
    unknown = [name for name in tree if name not in names]
    wrong = [_unknown(schema, prefix, str(name), tree[name], names) for name in unknown]
    values = dict[str, Any]()
    for name in names:
        key = join_key(prefix, name)
        try:
            if tree.get(name, "???") == "???":  # OmegaConf's mark for "must be given"
                if unknown:  # one of them may be this key, mistyped
                    continue
                raise required(key)
            values[name] = _convert(hints[name], tree[name], key)
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\n".join(wrong))
    try:
        section = schema(**values)
        if hasattr(section, "check"):
            section.check()
    except InvalidField as error:
        raise UserError(join_key(prefix, str(error))) from None
    return section


def check_values(value: Any, key: str = "") -> None:
    """Checks a value of a config at any depth: numbers are finite, integers have 64 bits, texts no
    NUL, and the user of "~user/..." exists. No key has a use for others: a learning rate of
    infinity makes NaN of every weight. Raises UserError, which names the key."""
    if isinstance(value, dict):
        for name, entry in value.items():
            check_values(entry, join_key(key, str(name)))
    elif isinstance(value, list):
        for at, entry in enumerate(value):
            check_values(entry, f"{key}[{at}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise not_valid(key, value, "a finite number")
    elif isinstance(value, int) and abs(value) > MOST_INTEGER:
        raise not_valid(key, value, "an integer of at most 64 bits")
    elif isinstance(value, str) and "\0" in value:
        raise not_valid(key, value, "a text without NUL")
    elif isinstance(value, str) and _is_of_nobody(value):
        raise not_valid(key, value, "a path in the home of a user of this machine")


def _is_of_nobody(text: str) -> bool:
    """Whether a text is a path "~user/..." without such a user: a RuntimeError of pathlib."""
    return re.match(r"~[\w.-]*/", text) is not None and os.path.expanduser(text) == text


def _convert(kind: Any, value: Any, key: str) -> Any:
    if kind is Any:
        return value
    if is_union(kind):
        return _convert_union(kind, value, key)
    if get_origin(kind) is Literal:
        if any(type(choice) is type(value) and choice == value for choice in get_args(kind)):
            return value
        raise _mismatch(key, value, kind)
    if kind is Component:
        return as_component(value, key)
    if is_dataclass(kind):
        return build_section(kind, value, key)
    base = get_origin(kind) or kind
    if base is list and isinstance(value, list):
        (item,) = get_args(kind) or (Any,)
        whole = [_with_defaults(item, entry) for entry in value]
        return [_convert(item, entry, f"{key}[{at}]") for at, entry in enumerate(whole)]
    if base is dict and isinstance(value, dict):
        _, item = get_args(kind) or (Any, Any)
        entries = {str(name): _with_defaults(item, entry) for name, entry in value.items()}
        return {name: _convert(item, entry, join_key(key, name)) for name, entry in entries.items()}
    if base is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise _mismatch(key, value, kind) from None
        check_values(number, key)  # "nan" is a text that float() takes
        return number
    if type(value) is base:
        return value
    raise _mismatch(key, value, kind)


def _with_defaults(kind: Any, value: Any) -> Any:
    """An entry of a mapping or list of sections; `overlay` does not reach their defaults."""
    section = section_of(kind)
    if section is None or not isinstance(value, dict):
        return value
    return overlay(section, defaults(section), value)


def _convert_union(kind: Any, value: Any, key: str) -> Any:
    members = get_args(kind)
    if value is None and types.NoneType in members:
        return None
    # If only one member has the value's shape, its message is better than that of the union.
    if isinstance(value, (dict, list)):
        members = tuple(m for m in members if _takes_shape(m, value))
        if len(members) == 1:
            return _convert(members[0], value, key)
    for member in sorted(members, key=lambda member: member is not type(value)):
        try:
            return _convert(member, value, key)
        except UserError:
            continue
    raise _mismatch(key, value, kind)


def _takes_shape(kind: Any, value: dict[Any, Any] | list[Any]) -> bool:
    if isinstance(value, list):
        return (get_origin(kind) or kind) is list
    return (get_origin(kind) or kind) is dict or is_dataclass(kind)


def as_component(value: Any, key: str) -> Component:
    """The component that a node of a config at `key` names; raises UserError if it names none."""
    if isinstance(value, str):
        check_no_file(key, value)
        return Component(value, key=key)
    if not isinstance(value, dict):
        raise not_valid(key, value, COMPONENT_WORDS)
    path = value.get("_component_", "???")
    if path == "???":
        raise UserError(f"{key}._component_ is required; give it in the config file")
    if not isinstance(path, str):
        raise not_valid(f"{key}._component_", path, TYPE_WORDS[str])
    check_no_file(key, path)
    return Component(path, {str(k): v for k, v in value.items() if k != "_component_"}, key)


def _mismatch(key: str, value: Any, kind: Any) -> UserError:
    members = get_args(kind) if is_union(kind) else (kind,)
    choices = [str(c) for m in members if get_origin(m) is Literal for c in get_args(m)]
    hint = did_you_mean(nearest(str(value), choices))
    return UserError(f"{not_valid(key, value, _expected(kind))}{hint}")


def _expected(kind: Any) -> str:
    base = get_origin(kind) or kind
    if is_union(kind):
        return " or ".join(_expected(member) for member in get_args(kind))
    if base is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if base is list:
        (item,) = get_args(kind) or (Any,)
        return f"a list of {_PLURALS[item]}" if item in _PLURALS else "a list"
    if base is Component:
        return COMPONENT_WORDS
    return TYPE_WORDS.get(base, "a section" if is_dataclass(base) else str(base))


def _unknown(root: type, prefix: str, name: str, value: Any, siblings: list[str]) -> str:
    """The message for an unknown key: its name in qfsdp if another project has it, or a similar
    key; `siblings` are the keys of its section."""
    key, known = join_key(prefix, name), list(schema_keys(root))
    message = f"unknown key '{key}'"
    if answer := answer_to(key, value) or answer_to(name, value):
        return message + in_words(answer, has_key(root, answer.partition("=")[0]))
    elsewhere = [known_key for known_key in known if known_key.rpartition(".")[2] == name]
    sibling = nearest(name, siblings)
    near = elsewhere[0] if elsewhere else sibling and join_key(prefix, sibling)
    return message + did_you_mean(near or nearest(key, known) or _nearest_leaf(key, known))


def _nearest_leaf(key: str, known: list[str]) -> str | None:
    leaves = {name.rpartition(".")[2]: name for name in known}
    near = nearest(key.rpartition(".")[2], leaves)
    return near and leaves[near]


def schema_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """All keys of a schema, as "section.name"."""
    for name, kind in get_type_hints(schema).items():
        yield join_key(prefix, name)
        if (section := section_of(kind)) is not None:
            yield from schema_keys(section, join_key(prefix, name))


def has_key(schema: type, key: str) -> bool:
    """Whether a schema has a key, or a component or mapping that the key may stand in."""
    name, _, rest = key.partition(".")
    kind = get_type_hints(schema).get(name)
    if kind is None or not rest:
        return kind is not None
    section = section_of(kind)
    return has_key(section, rest) if section is not None else True


def holds_text(schema: type, tree: Any, key: str) -> bool:
    """Whether a key holds text, or text and null: a field of a schema, or an argument of the
    component that `tree` has there."""
    *parents, last = key.split(".")
    kind: Any = schema
    for name in parents:
        tree = tree.get(name) if isinstance(tree, dict) else None
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif is_dataclass(kind) and kind is not Component:
            hint = get_type_hints(kind).get(name)
            kind = section_of(hint) or hint
    if get_origin(kind) is dict:
        return _is_text(get_args(kind)[1])
    if is_dataclass(kind) and kind is not Component:
        return _is_text(get_type_hints(kind).get(last))
    try:
        arguments = passed_by_name(as_component(tree, key).resolve())
    except UserError:  # reported later
        return False
    return last in arguments and _is_text(arguments[last].annotation)


def _is_text(kind: Any) -> bool:
    return kind is str or (is_union(kind) and set(get_args(kind)) == {str, types.NoneType})


def section_of(kind: Any) -> Any:
    """The dataclass that a field's type names, alone or as `X | None`; else None."""
    members = [m for m in (get_args(kind) if is_union(kind) else (kind,)) if is_dataclass(m)]
    return members[0] if len(members) == 1 and members[0] is not Component else None


def plain_tree(value: Any, text: Callable[[str], str] = str) -> Any:
    """Dataclasses and their values as dicts and lists; every string passes through `text`."""
    if isinstance(value, Component):
        return {"_component_": value.path, **plain_tree(value.kwargs, text)}
    if is_dataclass(value):
        names = section_names(value)
        return {name: plain_tree(getattr(value, name), text) for name in names}
    if isinstance(value, dict):
        return {key: plain_tree(entry, text) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_tree(entry, text) for entry in value]
    return text(value) if isinstance(value, str) else value
