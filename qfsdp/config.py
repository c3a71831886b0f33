"""From a dataclass schema, a YAML file and `key=value` words to one typed, checked config.

A recipe declares what it can be told as plain dataclasses; `load_config` reads the YAML, applies
the command line, fills in the schema's defaults, resolves interpolations and converts every
value strictly. Whatever a user can get wrong comes back as one line that names the key and, where
one is near, the right spelling, so that a typo never trains for a day with the default instead.

Parts that a user may swap (optimizer, dataset, ...) keep torchtune's form, a mapping with
`_component_` and arguments. They are `Component`s here: imported and checked on demand.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qfsdp.errors import InvalidField, UserError

T = TypeVar("T")

# torchtune's names for what a qfsdp schema may call otherwise. A value with a space in it is a
# sentence; any other is one of our keys, which a recipe may or may not have.
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


# ---- components ----------------------------------------------------------------------------


@dataclass
class Component:
    """A part that the config names by its import path: `_component_` and its arguments.

    `path` is the dotted path of a class or function, `kwargs` are the arguments from the config.
    In the three methods `key` is the component's place in the config, for the messages.
    """

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def resolve(self, key: str = "") -> Any:
        """Imports and returns the object; modules in the working directory count.

        Raises UserError when it does not exist or its module fails to import.
        """
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        names, at = self.path.split("."), 0
        found: Any = None
        try:
            found = importlib.import_module(names[0])
            for at, name in enumerate(names[1:], 1):
                if not hasattr(found, name):
                    importlib.import_module(".".join(names[: at + 1]))
                found = getattr(found, name)
        except Exception as error:  # a module may raise anything while it is imported
            place, missing = _join(key, "_component_"), getattr(error, "name", None)
            if isinstance(error, ModuleNotFoundError) and f"{self.path}.".startswith(f"{missing}."):
                hint = _did_you_mean(_nearest_path(names, at, found))
                raise UserError(f"{place}: '{self.path}' does not exist{hint}") from None
            reason = f"importing '{self.path}' failed: {_first_line(error)}"
            raise UserError(f"{place}: {reason}") from error
        return found

    def check(self, key: str, provided: Sequence[str] | None = ()) -> None:
        """Compares the arguments with the object's signature, without calling it.

        `provided` names the arguments that the recipe passes itself: the config may not give
        them. None means that they are not known; then nothing is held to be missing. Raises
        UserError for an unknown, missing or already provided argument, and for a string where
        the signature wants a number or a truth value.
        """
        target = self.resolve(key)
        if not callable(target):
            raise UserError(f"{_join(key, '_component_')}: '{self.path}' cannot be called")
        for name in self.kwargs:
            if name in (provided or ()):
                raise UserError(f"{key}.{name}: the recipe passes this argument itself; remove it")
        parameters = _parameters(target)
        if parameters is None:
            return
        kinds = {parameter.kind for parameter in parameters.values()}
        named = {n: p for n, p in parameters.items() if p.kind not in _NOT_BY_NAME}
        for name, value in self.kwargs.items():
            if name in named:
                _check_argument(f"{key}.{name}", value, named[name].annotation)
            elif inspect.Parameter.VAR_KEYWORD not in kinds:
                raise UserError(
                    f"{key}.{name}: '{self.path}' takes no argument '{name}'"
                    + _did_you_mean(_nearest(name, set(named) - set(provided or ())))
                )
        for name, parameter in named.items():
            required = parameter.default is inspect.Parameter.empty
            if required and provided is not None and name not in {*self.kwargs, *provided}:
                raise UserError(f"{key}.{name} is required by '{self.path}'")

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the object with `args`, the config's arguments and `kwargs` (which win)."""
        return self.resolve()(*args, **{**self.kwargs, **kwargs})


def _nearest_path(names: list[str], at: int, parent: Any) -> str | None:
    """The dotted path with its wrong part, `names[at]`, replaced by what `parent` does have."""
    paths = getattr(parent, "__path__", []) if at else None
    known = [*dir(parent)] if at else []
    near = _nearest(names[at], known + [module.name for module in pkgutil.iter_modules(paths)])
    return near and ".".join([*names[:at], near, *names[at + 1 :]])


_NOT_BY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters with evaluated annotations where that works; None for opaque builtins."""
    try:
        return inspect.signature(target, eval_str=True).parameters
    except Exception:  # evaluating an annotation runs foreign code
        pass
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def _check_argument(key: str, value: Any, annotation: Any) -> None:
    # Only the one mistake that YAML invites: text where a number belongs. Anything that is not
    # plainly a class (Any, TypeVar, Literal, a string left unevaluated) may well accept text.
    members = get_args(annotation) if _is_union(annotation) else (annotation,)
    wanted = [kind for kind in (bool, int, float) if kind in members]
    takes_text = any(not isinstance(kind, type) or issubclass(str, kind) for kind in members)
    if isinstance(value, str) and wanted and not takes_text:
        raise _not_valid(key, value, " or ".join(_NAMES[kind] for kind in wanted))


# ---- reading -------------------------------------------------------------------------------


def load_config(schema: type[T], argv: Sequence[str]) -> T:
    """Builds `schema` from a YAML file and command-line overrides.

    `argv` is `--config FILE` followed by any of `key=value`, `section.key=value` and `~key`
    (back to the schema's default), applied in their order. Values are YAML. A section or the
    schema itself may define `check()`, which raises `InvalidField`.

    Raises UserError for whatever is wrong with the words, the file, a key or a value.
    """
    path, overrides = _split_argv(argv)
    tree = _read_yaml(path)
    for word in overrides:
        _apply_override(tree, word)
    tree = _overlay(schema, _defaults(schema), tree)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        reason = _first_line(error)
        missing = re.search(r"Interpolation key '(.*)' not found|mandatory value: (.*)$", reason)
        if missing and (name := missing[1] or missing[2]) in _keys(schema):
            raise _required(name) from None
        raise UserError(f"{error.full_key}: {reason}") from None
    try:
        return _build(schema, resolved, "")
    except _UnknownKey as error:
        raise UserError(_explain_unknown(schema, error)) from None


def _split_argv(argv: Sequence[str]) -> tuple[str, list[str]]:
    path, overrides = None, []
    words = iter(argv)
    for word in words:
        if word == "--config":
            path = next(words, None)
        elif word.startswith("--config="):
            path = word.partition("=")[2]
        elif word.startswith("-") and "=" in word:
            bare = word.lstrip("-")
            raise UserError(f"'{word}': overrides are written without dashes: {bare}")
        elif word.startswith("~") or word.partition("=")[0] not in ("", word):
            overrides.append(word)
        else:
            raise UserError(f"'{word}' is not understood; overrides are written key=value")
    if not path:
        raise UserError("no config given; expected --config FILE [key=value ...]")
    return path, overrides


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        hint = "; `tune ls` lists those that come with qfsdp"
        raise UserError(f"--config {path}: no such file{hint}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {error.full_key}: {_first_line(error)}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {_first_line(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected keys and values, not a list")
    return {str(key): value for key, value in tree.items()}


def _apply_override(tree: dict[str, Any], word: str) -> None:
    if word.startswith("~"):
        *parents, last = word[1:].partition("=")[0].split(".")
        node: Any = tree
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last not in node:
            raise UserError(f"{word}: the config file has no such key to remove")
        del node[last]
        return
    key, _, text = word.partition("=")
    *parents, last = key.split(".")
    value, node = _parse_value(word, text), tree
    for name in parents:
        child = node.get(name)
        if isinstance(child, list):
            raise UserError(f"{word}: '{name}' is a list; give it as a whole: {name}=[...]")
        if isinstance(child, str):  # optimizer=torch.optim.SGD came before optimizer.lr=0.1
            child = {"_component_": child}
        node[name] = node = child if isinstance(child, dict) else {}
    node[last] = _onto_component(node.get(last), value)


def _parse_value(word: str, text: str) -> Any:
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except yaml.YAMLError:
        raise UserError(f"'{word}': the value is not valid YAML") from None
    except OmegaConfBaseException as error:
        raise UserError(f"'{word}': {_first_line(error)}") from None
    return None if text == "None" else parsed["value"]


def _onto_component(below: Any, above: Any) -> Any:
    """Laid over a component node, a string names another one and keeps the arguments, as in
    torchtune; a mapping without `_component_` changes arguments only; all else replaces it."""
    if isinstance(below, dict) and "_component_" in below:
        if isinstance(above, str):
            return {**below, "_component_": above}
        if isinstance(above, dict) and "_component_" not in above:
            return {**below, **above}
    return above


def _defaults(schema: type) -> dict[str, Any]:
    """The schema's defaults as a plain tree; fields without one are left out."""
    tree: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for entry in fields(schema):
        if entry.default is not MISSING:
            tree[entry.name] = _plain(entry.default)
        elif entry.default_factory is not MISSING:
            tree[entry.name] = _plain(entry.default_factory())
        elif (section := _section(hints[entry.name])) is not None:
            tree[entry.name] = _defaults(section)
    return tree


def _overlay(schema: type, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: sections key by key, component nodes by their own rule."""
    hints = get_type_hints(schema)
    # In the schema's order: interpolations are resolved in it, and the first error is told.
    order = [name for name in hints if name in below or name in above]
    tree = {name: below.get(name) for name in order} | above
    for name in order:
        if name not in above:
            continue
        low, high, kind = below.get(name), above[name], hints[name]
        section = _section(kind)
        if section is None:
            emptied = high is None and (get_origin(kind) or kind) is dict
            tree[name] = low if emptied else _onto_component(low, high)
        elif isinstance(high, dict):
            tree[name] = _overlay(section, low if low is not None else _defaults(section), high)
        elif high is None and not _is_union(kind):  # `adapter:` with every line commented out
            tree[name] = low
    return tree


# ---- conversion ----------------------------------------------------------------------------

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    types.NoneType: "null",
    Component: "a mapping with _component_",
}
_PLURALS = {int: "integers", float: "numbers", str: "strings", dict: "mappings"}


class _UnknownKey(Exception):
    def __init__(self, prefix: str, name: str, siblings: list[str]) -> None:
        super().__init__(name)
        self.prefix, self.name, self.siblings = prefix, name, siblings


def _build(schema: Any, tree: Any, prefix: str) -> Any:
    """One section: names first, then values, then the section's own `check()`."""
    names = [entry.name for entry in fields(schema) if entry.init]
    if not isinstance(tree, dict):
        raise _not_valid(prefix, tree, f"a section with the keys {', '.join(names)}")
    hints = get_type_hints(schema)
    for name in tree:
        if name not in names:
            raise _UnknownKey(prefix, str(name), names)
    for name in names:
        if tree.get(name, "???") == "???":  # OmegaConf's mark for "must be given"
            raise _required(_join(prefix, name))
    values = {name: _convert(hints[name], tree[name], _join(prefix, name)) for name in names}
    try:
        section = schema(**values)
        if hasattr(section, "check"):
            section.check()
    except InvalidField as error:
        raise UserError(_join(prefix, str(error))) from None
    return section


def _convert(kind: Any, value: Any, key: str) -> Any:
    if kind is Any:
        return value
    if _is_union(kind):
        return _convert_union(kind, value, key)
    if get_origin(kind) is Literal:
        if any(type(choice) is type(value) and choice == value for choice in get_args(kind)):
            return value
        raise _mismatch(key, value, kind)
    if kind is Component:
        return as_component(value, key)
    if is_dataclass(kind):
        return _build(kind, value, key)
    base = get_origin(kind) or kind
    if base is list and isinstance(value, list):
        (item,) = get_args(kind) or (Any,)
        return [_convert(item, entry, f"{key}[{at}]") for at, entry in enumerate(value)]
    if base is dict and isinstance(value, dict):
        _, item = get_args(kind) or (Any, Any)
        whole = {str(name): _with_defaults(item, entry) for name, entry in value.items()}
        return {name: _convert(item, entry, _join(key, name)) for name, entry in whole.items()}
    if base is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise _mismatch(key, value, kind) from None
    if type(value) is base:
        return value
    raise _mismatch(key, value, kind)


def _with_defaults(kind: Any, value: Any) -> Any:
    """An entry of a mapping of sections, whose defaults `_overlay` does not know."""
    section = _section(kind)
    if section is None or not isinstance(value, dict):
        return value
    return _overlay(section, _defaults(section), value)


def _convert_union(kind: Any, value: Any, key: str) -> Any:
    members = get_args(kind)
    if value is None and types.NoneType in members:
        return None
    # Where only one member has the value's shape, its own message says more than the union's.
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
        raise _not_valid(key, value, _NAMES[Component])
    path = value.get("_component_", "???")
    if path == "???":
        raise UserError(f"{key}._component_ is required; give it in the config file")
    if not isinstance(path, str):
        raise _not_valid(f"{key}._component_", path, _NAMES[str])
    return Component(path, {str(k): v for k, v in value.items() if k != "_component_"})


def _mismatch(key: str, value: Any, kind: Any) -> UserError:
    members = get_args(kind) if _is_union(kind) else (kind,)
    choices = [str(c) for m in members if get_origin(m) is Literal for c in get_args(m)]
    hint = _did_you_mean(_nearest(str(value), choices))
    return UserError(f"{_not_valid(key, value, _expected(kind))}{hint}")


def _expected(kind: Any) -> str:
    base = get_origin(kind) or kind
    if _is_union(kind):
        return " or ".join(_expected(member) for member in get_args(kind))
    if base is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if base is list:
        (item,) = get_args(kind) or (Any,)
        return f"a list of {_PLURALS[item]}" if item in _PLURALS else "a list"
    return _NAMES.get(base, "a section" if is_dataclass(base) else str(base))


# ---- messages ------------------------------------------------------------------------------


def _explain_unknown(root: type, unknown: _UnknownKey) -> str:
    key, known = _join(unknown.prefix, unknown.name), list(_keys(root))
    message = f"unknown key '{key}'"
    hint = TORCHTUNE_KEYS.get(key, "")
    if " " in hint:
        return f"{message}; {hint}"
    if hint:
        missing = "" if hint.partition("=")[0] in known else ", which this recipe does not have"
        return f"{message}; qfsdp calls it '{hint}'{missing}"
    elsewhere = [name for name in known if name.rpartition(".")[2] == unknown.name]
    sibling = _nearest(unknown.name, unknown.siblings)
    near = elsewhere[0] if elsewhere else sibling and _join(unknown.prefix, sibling)
    return message + _did_you_mean(near or _nearest(key, known) or _nearest_leaf(key, known))


def _nearest_leaf(key: str, known: list[str]) -> str | None:
    leaves = {name.rpartition(".")[2]: name for name in known}
    near = _nearest(key.rpartition(".")[2], leaves)
    return near and leaves[near]


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    for name, kind in get_type_hints(schema).items():
        yield _join(prefix, name)
        if (section := _section(kind)) is not None:
            yield from _keys(section, _join(prefix, name))


def _nearest(word: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def _did_you_mean(near: str | None) -> str:
    return f"; did you mean '{near}'?" if near else ""


def _not_valid(key: str, value: Any, expected: str) -> UserError:
    return UserError(f"{key}: {value!r} is not valid; expected {expected}")


def _required(key: str) -> UserError:
    return UserError(f"{key} is required; give it in the config file or as {key}=VALUE")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _section(kind: Any) -> Any:
    """The dataclass that a field's type names, alone or as `X | None`; else None."""
    members = [m for m in (get_args(kind) if _is_union(kind) else (kind,)) if is_dataclass(m)]
    return members[0] if len(members) == 1 and members[0] is not Component else None


# ---- writing and checking a finished config ------------------------------------------------


def get_key(config: Any, key: str) -> Any:
    """The value of "section.name" in a config; None where it has no such key."""
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


def to_yaml(config: Any) -> str:
    """The config as YAML text, every default and interpolation written out.

    `load_config` of that text gives an equal config.
    """
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config, _escape)))


def check_components(config: Any, key: str = "") -> None:
    """Checks every Component in a config as far as that can be done without the recipe.

    Raises UserError as `Component.check` does; an argument that is missing is not noticed.
    """
    if isinstance(config, Component):
        config.check(key, provided=None)
    elif is_dataclass(config):
        for entry in fields(config):
            check_components(getattr(config, entry.name), _join(key, entry.name))
    elif isinstance(config, list):
        for at, entry in enumerate(config):
            check_components(entry, f"{key}[{at}]")
    elif isinstance(config, dict):
        for name, entry in config.items():
            check_components(entry, _join(key, name))


def _plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """Dataclasses and what they hold as dicts and lists; every string passes through `text`."""
    if isinstance(value, Component):
        return {"_component_": value.path, **_plain(value.kwargs, text)}
    if is_dataclass(value):
        entries = [entry.name for entry in fields(value) if entry.init]
        return {name: _plain(getattr(value, name), text) for name in entries}
    if isinstance(value, dict):
        return {key: _plain(entry, text) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, text) for entry in value]
    return text(value) if isinstance(value, str) else value


def _escape(text: str) -> str:
    """So that `${` in a finished string is not taken for an interpolation when read again."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
