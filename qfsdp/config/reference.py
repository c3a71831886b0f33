"""What every key of a recipe means: `tune run RECIPE --help` and docs/reference/configuration.md.

Types and defaults come from the recipe's dataclasses. The sentence of a key stands in the source,
once: in the entry "Fields:" of the dataclass's docstring, or as the comment behind the field. The
sentence of a section is the first one of its docstring. What a component takes comes from its
signature, and from "Args:" in its docstring.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import shutil
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qfsdp.common.errors import UserError
from qfsdp.common.messages import is_union, join_key
from qfsdp.config.component import Component, further_keys, passed_by_name
from qfsdp.config.component_types import kind_at
from qfsdp.config.convert import as_component, defaults, section_of
from qfsdp.config.load import get_key, read_tree
from qfsdp.config.recipe_files import load_recipe

HELP = ("-h", "--help")
REQUIRED = object()  # in place of a default
_TYPES = {bool: "true | false", int: "integer", float: "number", str: "text", dict: "mapping"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}
_SAME = re.compile(r"as in `(\w+)`\.?")
_wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
_ENTRY = re.compile(r"\*{0,2}(\w+(?:, \w+)*)(?: \([^)]*\))?: (.*)")


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Fields:
        name: with its section, such as "adapter.rank".
        type: in words; "section" for a section.
        default: as a plain value; `REQUIRED` without one.
        sentence: what it means; "" if its author has not said.
    """

    name: str
    type: str
    default: Any = field(hash=False)  # a list has no hash
    sentence: str


# ---- from the source -----------------------------------------------------------------------


def keys_of(schema: type, prefix: str = "", given: Any = None) -> Iterator[Key]:
    """All keys of a schema, each section followed by its keys.

    Args:
        prefix: the section's place in the config.
        given: the section's defaults where the section above it has others than the schema.
    """
    values = defaults(schema) | (given or {})
    hints, sentences = get_type_hints(schema), field_sentences(schema)
    for entry in fields(schema):
        name, kind = join_key(prefix, entry.name), hints[entry.name]
        default, section = values.get(entry.name, REQUIRED), section_of(kind)
        sentence = sentences.get(entry.name) or (section and section_sentence(section)) or ""
        yield Key(name, type_words(kind), default if section is None else None, sentence)
        if section is not None:
            yield from keys_of(section, name, default if isinstance(default, dict) else None)
        elif (inner := _sections_by_name(kind)) is not None:
            yield from keys_of(inner, f"{name}.NAME")


def _sections_by_name(kind: Any) -> Any:
    """The dataclass of `dict[str, dataclass]`; else None."""
    inner = get_args(kind)[1:] if get_origin(kind) is dict else ()
    return inner[0] if inner and is_dataclass(inner[0]) and inner[0] is not Component else None


def type_words(kind: Any) -> str:
    """A type as a user writes its values: "integer | null", "lora | dora | ia3"."""
    base = get_origin(kind) or kind
    if is_union(kind):
        return " | ".join(dict.fromkeys(type_words(member) for member in get_args(kind)))
    if base is Literal:
        return " | ".join(str(choice) for choice in get_args(kind))
    if kind is None or base is types.NoneType:
        return "null"
    if base is Component:
        return "component"
    if is_dataclass(base):
        return "section"
    if base in (list, tuple):
        item = next(iter(get_args(kind)), None)
        return f"list of {_PLURALS[item]}" if item in _PLURALS else "list"
    if base is dict and get_args(kind) and get_args(kind)[1] is not Any:
        words = type_words(get_args(kind)[1])
        return f"{words.replace('list', 'lists', 1) if 'list' in words else f'{words}s'} by name"
    return _TYPES.get(base) or str(getattr(base, "__name__", base))


def section_sentence(schema: type) -> str:
    """The first paragraph of a section's docstring, without "Section `name`:"."""
    text = " ".join((inspect.getdoc(schema) or "").partition("\n\n")[0].split())
    return re.sub(r"^(Section|One entry of section) `\w+`: ", "", text)


def field_sentences(schema: type) -> dict[str, str]:
    """Names of fields -> their sentences; those of base classes too."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            found |= _comments(base) | entries(base.__doc__ or "", "Fields:")
    return found


def entries(docstring: str, heading: str) -> dict[str, str]:
    """`name: text` below a heading of a docstring; "a, b: text" counts for both."""
    _, found, below = inspect.cleandoc(docstring).partition(f"{heading}\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    indent = len(below) - len(below.lstrip(" "))
    for line in below.splitlines() if found else []:
        depth = len(line) - len(line.lstrip())
        if line.strip() and depth < indent:
            break
        if depth == indent and (match := _ENTRY.match(line.strip())):
            names = match[1].split(", ")
            texts |= dict.fromkeys(names, match[2])
        elif line.strip():
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def _comments(schema: type) -> dict[str, str]:
    """Names of fields -> the comments behind them."""
    try:
        source = textwrap.dedent(inspect.getsource(schema))
    except (OSError, TypeError):  # no file: a class made by `exec`
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
    (definition,) = ast.parse(source).body
    found = {}
    for statement in definition.body if isinstance(definition, ast.ClassDef) else []:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            comment = comments.get(statement.end_lineno or 0, "")
            found[statement.target.id] = comment.lstrip("# ")
    return {name: text for name, text in found.items() if text}


def component_keys(component: Component, place: str) -> Iterator[Key]:
    """What a component takes, by its signature; without what the recipe passes. Raises UserError,
    as `Component.resolve`."""
    target = component.resolve(place)
    owner = target.__init__ if inspect.isclass(target) else target
    said, kind = _argument_sentences(target) | _argument_sentences(owner), kind_at(place)
    for name, parameter in passed_by_name(target).items():
        if kind is None or name != kind.passed:
            missing = parameter.default is inspect.Parameter.empty
            annotated = parameter.annotation is not inspect.Parameter.empty
            yield Key(
                join_key(place, name),
                type_words(parameter.annotation) if annotated else "",
                REQUIRED if missing else parameter.default,
                said.get(name, ""),
            )
    if (further := further_keys(target)) is not None:
        yield from keys_of(further, place)


def _argument_sentences(target: Any) -> dict[str, str]:
    """Names of arguments -> their sentences; "as in `other`." is what `other` says of it.

    `other` is a function that the module of `target` has, or a package that it is in.
    """
    text = target.__doc__ or ""
    said = entries(text, "Arguments:") | entries(text, "Args:")
    module = sys.modules.get(str(getattr(target, "__module__", None)))
    for name, sentence in said.items():
        if module is not None and (same := _SAME.fullmatch(sentence)):
            parts = module.__name__.split(".")
            places = [sys.modules.get(".".join(parts[:n])) for n in range(len(parts), 0, -1)]
            other = next((getattr(p, same[1]) for p in places if hasattr(p, same[1])), None)
            said[name] = _argument_sentences(other).get(name, sentence)
    return said


# ---- `--help` ------------------------------------------------------------------------------


def wants_help(argv: Sequence[str]) -> bool:
    """Whether the words of a recipe ask for its keys."""
    return any(word in HELP for word in argv)


def print_help(usage: str, recipe_file: str, argv: Sequence[str]) -> None:
    """Prints all keys of a recipe; with `--config` in `argv` also the values and components there.
    Raises UserError: the recipe has no dataclass `Config`, or the config cannot be read."""
    recipe = load_recipe(recipe_file)
    if not is_dataclass(recipe.Config):
        raise UserError(f"{recipe_file}: Config is no dataclass, so it has no keys to list")
    width = min(100, max(60, shutil.get_terminal_size().columns))
    for line in help_lines(recipe, usage, [word for word in argv if word not in HELP], width):
        print(line)


def help_lines(recipe: ModuleType, usage: str, argv: Sequence[str], width: int) -> Iterator[str]:
    """The lines of `print_help`, at most `width` columns wide where the texts allow it."""
    schema: Any = recipe.Config
    tool = hasattr(recipe, "run_tool")
    config = not tool and any(word.partition("=")[0] == "--config" for word in argv)
    tree = read_tree(schema, argv)[1] if config else {}
    yield from _wrap(f"usage: {usage}", width, subsequent_indent=" " * 8)
    yield ""
    yield (inspect.getdoc(recipe) or "").partition("\n")[0]
    yield ""
    yield "Keys, for the YAML file or as key=value; ~key takes one back to its default."
    if tool:
        yield "All other keys change the training config: see --help of its recipe."
    elif not config:
        yield "With --config FILE: also the values there, and what its components take."
    section = ""  # that the last key was in
    for key in keys_of(schema):
        value, top = get_key(tree, key.name), key.name.partition(".")[0]
        if top != section and (section or key.type == "section"):
            yield ""
        section = top if top == section or key.type == "section" else ""
        yield from _key_lines(key, value, width)
        if isinstance(value, list) and "component" in key.type.split():
            for at, entry in enumerate(value):
                yield from _component_lines(f"{key.name}[{at}]", entry, width)
        elif "component" in key.type.split():
            yield from _component_lines(key.name, value, width)
        elif key.type == "components by name" and isinstance(value, dict):
            for name, entry in value.items():
                yield from _component_lines(f"{key.name}.{name}", entry, width)


def _component_lines(place: str, value: Any, width: int) -> Iterator[str]:
    kind = kind_at(place)
    words = f"import path of {kind.words}" if kind else "import path of a class or function"
    path = value.get("_component_") if isinstance(value, dict) else value
    yield from _key_lines(Key(f"{place}._component_", "text", REQUIRED, words), path, width)
    if path is None:
        yield f"  {place}.ARGUMENT: what it takes"
        return
    try:
        component = as_component(value, place)
        for key in component_keys(component, place):
            yield from _key_lines(key, component.kwargs.get(key.name.rpartition(".")[2]), width)
    except UserError as error:
        yield f"      {error}"


def _key_lines(key: Key, value: Any, width: int) -> Iterator[str]:
    indent = "      "
    if key.type == "section":
        head = f"{key.name}: {key.sentence}"
        yield from textwrap.wrap(head, width, subsequent_indent=indent, break_on_hyphens=False)
        return
    kind = f": {key.type}" if key.type else ""
    default = ", required" if key.default is REQUIRED else f" = {shown(key.default)}"
    differs = value is not None and not isinstance(value, dict) and value != key.default
    head = f"  {key.name}{kind}{default}" + (f"   (here: {shown(value)})" if differs else "")
    if "\n" in head or len(head) <= width:
        yield head
    else:
        yield from _wrap(head, width, subsequent_indent=indent)
    yield from _wrap(key.sentence, width, initial_indent=indent, subsequent_indent=indent)


def shown(value: Any) -> str:
    """A value as YAML writes it, on one line."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(shown(entry) for entry in value)}]"
    if isinstance(value, dict) and set(value) == {"_component_"}:
        return str(value["_component_"])
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    return json.dumps(text) if text == "" or "\n" in text else text
