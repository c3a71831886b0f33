"""Converts a tree of plain values to a dataclass schema and back, and explains unknown keys."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qfsdp.cli.component import Component
from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.cli.messages import (
    TYPE_WORDS,
    did_you_mean,
    is_union,
    join_key,
    nearest,
    not_valid,
    required,
)

# torchtune's keys, and the keys of qfsdp that replace them. A value with a space in it is a
# sentence for the message; any other is a key, which a recipe may or may not have.
TORCHTUNE_KEYS = {
    "apply_lora_to_mlp": "adapter.targets",
    "apply_lora_to_output": "adapter.targets",
    "batch_size_val": "validation.batch_size",
    "checkpointer": "model.path",
    "custom_sharded_layers": "sharding.wrap",
    "dataset_val": "validation.sets",
    "device": "an accelerator is used wherever there is one",
    "dtype": "model.dtype",
    "enable_activation_checkpointing": "activation.checkpointing=full",
    "enable_activation_offloading": "activation.offload",
    "fsdp_cpu_offload": "sharding.cpu_offload",
    "fsdp_reshard_after_forward": "sharding.strategy=shard_grad_op",
    "fsdp_sharding_strategy": "sharding.strategy",
    "log_peak_memory_stats": "peak memory is always logged",
    "lora_attn_modules": "adapter.targets",
    "max_steps_per_epoch": "max_steps",
    "model._component_": "model.path",
    "model.apply_lora_to_mlp": "adapter.targets",
    "model.apply_lora_to_output": "adapter.targets",
    "model.lora_alpha": "adapter.alpha",
    "model.lora_attn_modules": "adapter.targets",
    "model.lora_dropout": "adapter.dropout",
    "model.lora_rank": "adapter.rank",
    "model.quantize_base": "quantization.format=nf4",
    "model.use_dora": "adapter.method=dora",
    "run_val_every_n_steps": "validation.eval_every",
}


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
    """`above` over `below`: sections key by key, components as `onto_component`."""
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


class UnknownKey(Exception):
    """A key that its section does not have; `siblings` are the keys that it has."""

    def __init__(self, prefix: str, name: str, siblings: list[str]) -> None:
        super().__init__(name)
        self.prefix, self.name, self.siblings = prefix, name, siblings


def build_section(schema: Any, tree: Any, prefix: str) -> Any:
    """Builds one section: checks names first, then values, then calls its `check()`."""
    names = [entry.name for entry in fields(schema) if entry.init]
    if not isinstance(tree, dict):
        raise not_valid(prefix, tree, f"a section with the keys {', '.join(names)}")
    hints = get_type_hints(schema)
    for name in tree:
        if name not in names:
            raise UnknownKey(prefix, str(name), names)
    for name in names:
        if tree.get(name, "???") == "???":  # OmegaConf's mark for "must be given"
            raise required(join_key(prefix, name))
    values = {name: _convert(hints[name], tree[name], join_key(prefix, name)) for name in names}
    try:
        section = schema(**values)
        if hasattr(section, "check"):
            section.check()
    except InvalidField as error:
        raise UserError(join_key(prefix, str(error))) from None
    return section


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
        return [_convert(item, entry, f"{key}[{at}]") for at, entry in enumerate(value)]
    if base is dict and isinstance(value, dict):
        _, item = get_args(kind) or (Any, Any)
        whole = {str(name): _with_defaults(item, entry) for name, entry in value.items()}
        return {name: _convert(item, entry, join_key(key, name)) for name, entry in whole.items()}
    if base is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise _mismatch(key, value, kind) from None
    if type(value) is base:
        return value
    raise _mismatch(key, value, kind)


def _with_defaults(kind: Any, value: Any) -> Any:
    """An entry of a mapping of sections; `overlay` does not reach their defaults."""
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
        return Component(value)
    if not isinstance(value, dict):
        raise not_valid(key, value, COMPONENT_WORDS)
    path = value.get("_component_", "???")
    if path == "???":
        raise UserError(f"{key}._component_ is required; give it in the config file")
    if not isinstance(path, str):
        raise not_valid(f"{key}._component_", path, TYPE_WORDS[str])
    return Component(path, {str(k): v for k, v in value.items() if k != "_component_"})


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


def explain_unknown(root: type, unknown: UnknownKey) -> str:
    """The message for an unknown key: its name in qfsdp if it is torchtune's, or a similar key."""
    key, known = join_key(unknown.prefix, unknown.name), list(schema_keys(root))
    message = f"unknown key '{key}'"
    hint = TORCHTUNE_KEYS.get(key, "")
    if " " in hint:
        return f"{message}; {hint}"
    if hint:
        missing = "" if hint.partition("=")[0] in known else ", which this recipe does not have"
        return f"{message}; qfsdp calls it '{hint}'{missing}"
    elsewhere = [name for name in known if name.rpartition(".")[2] == unknown.name]
    sibling = nearest(unknown.name, unknown.siblings)
    near = elsewhere[0] if elsewhere else sibling and join_key(unknown.prefix, sibling)
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


def section_of(kind: Any) -> Any:
    """The dataclass that a field's type names, alone or as `X | None`; else None."""
    members = [m for m in (get_args(kind) if is_union(kind) else (kind,)) if is_dataclass(m)]
    return members[0] if len(members) == 1 and members[0] is not Component else None


def plain_tree(value: Any, text: Callable[[str], str] = str) -> Any:
    """Dataclasses and their values as dicts and lists; every string passes through `text`."""
    if isinstance(value, Component):
        return {"_component_": value.path, **plain_tree(value.kwargs, text)}
    if is_dataclass(value):
        entries = [entry.name for entry in fields(value) if entry.init]
        return {name: plain_tree(getattr(value, name), text) for name in entries}
    if isinstance(value, dict):
        return {key: plain_tree(entry, text) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_tree(entry, text) for entry in value]
    return text(value) if isinstance(value, str) else value
