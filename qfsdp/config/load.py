"""Loads a config: a dataclass schema, a YAML file and `key=value` words give one typed object.

A recipe declares its config as plain dataclasses. `load_config` reads the YAML file, applies the
command line, fills in the schema's defaults, resolves interpolations, and converts every value
strictly. Every mistake is one line that names the key and a similar key if there is one, so a typo
never trains for a day with a default value.

Parts that a user may replace (optimizer, dataset, ...) are `Component`s, imported on demand.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qfsdp.common.errors import NEEDS_UTF8, UserError, shortened
from qfsdp.common.messages import did_you_mean, first_line, join_key, required
from qfsdp.common.printable import masked, masked_word, redacted
from qfsdp.config.component_types import LOGGER, Kind, kind_at
from qfsdp.config.convert import (
    as_component,
    build_section,
    check_values,
    defaults,
    holds_text,
    mistakes,
    onto_component,
    overlay,
    plain_tree,
    schema_keys,
)
from qfsdp.config.interpolations import resolve
from qfsdp.config.recipe_files import similar_name
from qfsdp.config.right_forms import not_understood

T = TypeVar("T")
_NULL_OR_QUOTED = re.compile(r"\s*(null|Null|NULL|None|~|'.*'|\".*\")\s*", re.DOTALL)
MOST_CHARACTERS = 1 << 20  # of a config file
MOST_LINES = 100  # of an error; a data file given as the config would have thousands
_KEPT = "_from_environment"  # attribute of a config: place -> interpolation, and what it gave


def load_config(schema: type[T], argv: Sequence[str]) -> T:
    """Builds `schema` from a YAML file and command-line overrides.

    Args:
        schema: a dataclass; it and its sections may define `check()`, which raises InvalidField.
        argv: `--config FILE`, then `key=value`, `section.key=value` and `~key` (back to the
            schema's default) in any number, applied in order. Values are YAML; those of keys that
            hold text are text as typed, unless they are null or in YAML's quotes.

    Raises:
        UserError: the words, the file, a key or a value is wrong.
    """
    return config_of(schema, *read_tree(schema, argv))


def config_of(schema: type[T], path: str, tree: dict[str, Any]) -> T:
    """As `load_config`, of a tree that `read_tree` or `over_defaults` returned.

    Args:
        path: of its file, for messages.
    """
    try:
        resolved, from_environment = resolve(tree)
    except RecursionError:
        raise UserError(f"{path}: a value refers to itself; expected no ring of ${{...}}") from None
    except OmegaConfBaseException as error:
        if names := _wrong_names(schema, tree):  # ${adapter.rank} of `adapter: qlora`
            raise UserError(redacted("\n".join(names))) from None
        reason = first_line(error)
        missing = re.search(r"Interpolation key '(.*)' not found|mandatory value: (.*)$", reason)
        if missing and (name := missing[1] or missing[2]) in schema_keys(schema):
            raise required(name) from None
        raise UserError(redacted(f"{error.full_key}: {reason}")) from None
    names = _wrong_names(schema, resolved)
    try:
        check_values(resolved)
        config = build_section(schema, resolved, "")
    except UserError as error:
        raise UserError(redacted(all_told([*names, str(error)], resolved))) from None
    built = plain_tree(config)
    kept = {path: (text, _at(built, path)) for path, text in from_environment.items()}
    object.__setattr__(config, _KEPT, kept)
    return config


def _wrong_names(schema: type, tree: dict[str, Any]) -> list[str]:
    """A line for each of the `mistakes`, so that the config of another project is told as a
    whole. Raises UserError for more than `MOST_LINES`."""
    wrong = list(islice(mistakes(schema, schema, tree), MOST_LINES + 1))
    if len(wrong) > MOST_LINES:
        raise UserError(redacted("\n".join([*wrong[:MOST_LINES], "... and more"])))
    return wrong


def all_told(errors: Sequence[str], tree: dict[str, Any]) -> str:
    """The lines of errors, and those of the components of a config: one start tells all mistakes.
    A key that has several lines is told by the first."""
    told: dict[str, str] = {}
    for line in chain(*(error.split("\n") for error in errors), _of_components(tree)):
        told.setdefault(line.partition(";")[0], line)
    return "\n".join(told.values())


def required_config() -> UserError:
    return UserError("no config given; expected --config FILE [key=value ...]")


def read_tree(schema: type, argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The config file's path, and its keys over the schema's defaults, changed by the other words.

    Neither keys nor values are checked, and interpolations are not resolved. Raises UserError.
    """
    path, overrides = split_words(argv, schema)
    if not path:
        raise required_config()
    tree = read_yaml(path)
    change(schema, tree, overrides)
    return path, over_defaults(schema, tree)


def change(schema: type, tree: dict[str, Any], words: Sequence[str]) -> None:
    """Applies `key=value` and `~key` words to the keys of a config file. Raises UserError."""
    for word in words:
        _apply_override(schema, tree, word)


def over_defaults(schema: type, tree: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config file over the schema's defaults, neither checked nor resolved."""
    below = defaults(schema)
    if hasattr(schema, "below"):  # what other keys give, such as an adapter
        below = overlay(schema, below, schema.below(tree))
    return overlay(schema, below, tree)


def split_words(argv: Sequence[str], schema: type) -> tuple[str | None, list[str]]:
    """The path behind `--config`, None without one, and the other words. Raises UserError for one
    that is no `key=value` or `~key`, and for a second `--config`."""
    paths, overrides = list[str](), list[str]()
    words = iter(argv)
    for word in words:
        if word == "--config":
            paths += [path] if (path := next(words, None)) is not None else []
        elif word.startswith("--config="):
            paths.append(word.partition("=")[2])
        elif word.startswith("-") and "=" in word:
            bare, word = masked_word(word.lstrip("-")), masked_word(word)
            raise UserError(f"'{word}': overrides are written without dashes: {bare}")
        elif word.startswith("~") or word.partition("=")[0] not in ("", word):
            overrides.append(word)
        else:
            raise UserError(not_understood(word, next(words, ""), next(words, ""), schema))
    if len(paths) > 1:
        raise UserError(f"--config: given {len(paths)} times: {', '.join(paths)}; expected one")
    return paths[0] if paths else None, overrides


def read_yaml(path: str) -> dict[str, Any]:
    """The keys of a config file, neither checked nor resolved. Raises UserError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise UserError(f"{path}: expected a config of at most {MOST_CHARACTERS:,} characters")
        if _check_and_count(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MOST_CHARACTERS:
            raise UserError(f"{path}: its references (*name) multiply; expected fewer of them")
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except FileNotFoundError:
        near = did_you_mean(similar_name("configs", path))
        hint = near or "; `qfsdp ls` lists those that come with qfsdp"
        raise UserError(f"--config {path}: no such file{hint}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {error.full_key}: {first_line(error)}") from None
    except RecursionError:
        raise UserError(f"{path}: too deeply nested; expected keys and values") from None
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"--config {shortened(path)}: cannot be read: {reason}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected keys and values, not a list")
    return {str(key): value for key, value in tree.items()}


_NOT_DECIMAL = re.compile(r"[-+]?(0[0-7_]+|[\d_]+(:\d+)+[\d_.]*)")


def _check_and_count(node: yaml.Node | None, known: dict[yaml.Node, int]) -> int:
    """Checks the numbers of a YAML document, and counts its values once every reference (`*name`)
    is replaced by a copy: twelve lines of ten references each stand for 10**11 values.

    Raises MarkedYAMLError: a number is octal or of base 60 in YAML (010 is 8, 1:30 is 90), which
    nobody means.
    """
    number = isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float"))
    if number and node is not None and _NOT_DECIMAL.fullmatch(node.value):
        problem = f"{node.value} is no decimal number; expected one, or quotes"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if node is not None and node not in known:
        inner = node.value if isinstance(node.value, list) else []
        flat = [
            part for entry in inner for part in (entry if isinstance(entry, tuple) else [entry])
        ]
        known[node] = 1 + sum(_check_and_count(part, known) for part in flat)
    return known.get(node, 0) if node is not None else 0


def _apply_override(schema: type, tree: dict[str, Any], word: str) -> None:
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
    if not text.strip():  # such as api_key=$KEY with a variable that is not set
        raise UserError(f"'{word}': no value; expected {key}=VALUE, or {key}=null for none")
    *parents, last = key.split(".")
    below = defaults(schema)
    seen = {**below, **{name: onto_component(below.get(name), tree[name]) for name in tree}}
    value: Any = as_text(word, text)
    # Of a key with text it stays as typed: "Fix: {x} # here" is no mapping, and has no comment.
    if _NULL_OR_QUOTED.fullmatch(text) or not holds_text(schema, seen, key):
        value = _parse_value(word, text)
    node = tree
    for name in parents:
        child = node.get(name)
        if isinstance(child, list):
            raise UserError(
                f"{masked_word(word)}: '{name}' is a list; give it as a whole: {name}=[...]"
            )
        if isinstance(child, str):  # after optimizer=torch.optim.SGD comes optimizer.lr=0.1
            child = {"_component_": child}
        node[name] = node = child if isinstance(child, dict) else {}
    node[last] = onto_component(node.get(last), value)


def as_text(word: str, text: str) -> str:
    """A value of `word` as text. Raises UserError for bytes of the command line that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown, locale = ascii(shortened(masked_word(word))), sys.getfilesystemencoding()
        if locale != "utf-8":
            raise UserError(f"{shown}: no text in the locale's {locale}; {NEEDS_UTF8}") from None
        raise UserError(f"{shown}: not UTF-8; expected UTF-8 text") from None
    return text.strip()


def _parse_value(word: str, text: str) -> Any:
    try:
        _check_and_count(yaml.compose(text, Loader=yaml.SafeLoader), {})
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: over 4300 digits
        problem = getattr(error, "problem", None)
        found = "the value is not valid YAML" + (f": {problem}" if problem else "")
        raise UserError(f"'{shortened(masked_word(word))}': {found}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"'{masked_word(word)}': {first_line(error)}") from None
    return None if text == "None" else parsed["value"]


def get_key(config: Any, key: str) -> Any:
    """The value of "section.name" in a config or in its tree; None if it has no such key."""
    for name in key.split("."):
        if isinstance(config, dict):
            config = config.get(name)
        else:
            config = None if isinstance(config, str | list) else getattr(config, name, None)
    return config


def to_yaml(config: Any) -> str:
    """The config as YAML text, every default and interpolation written out.

    Interpolations that read the environment stay as they are, and values of keys that look like
    secrets are masked: others may read the text. `load_config` of it gives an equal config, but
    for what is masked.
    """
    return OmegaConf.to_yaml(OmegaConf.create(_to_show(config, str)))


def as_omegaconf(config: Any) -> DictConfig:
    """As `to_yaml` in OmegaConf's form; an interpolation that stays is text, also if resolved."""
    return OmegaConf.create(_to_show(config, _escape))


def resolved_yaml(config: Any) -> str:
    """The config as YAML text with all its values, secrets too: to compare, not to show."""
    return OmegaConf.to_yaml(OmegaConf.create(plain_tree(config, _escape)))


def _to_show(config: Any, kept: Callable[[str], str]) -> Any:
    plain, tree = plain_tree(config), masked(plain_tree(config, _escape))
    for path, (text, value) in getattr(config, _KEPT, {}).items():
        if value is not None and _at(plain, path) == value:  # not changed since it was read
            _at(tree, path[:-1])[path[-1]] = kept(text)
    return tree


def kept_places(config: Any) -> list[tuple[str, ...]]:
    """The places of a config's values that were read from the environment."""
    return [tuple(map(str, path)) for path in getattr(config, _KEPT, {})]


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    for name in path:
        try:
            tree = tree[name]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def check_components(config: Any) -> None:
    """Checks every Component in a config; raises UserError as `Component.check`, a line for each.

    Missing arguments are not found: the recipe may pass them.
    """
    if wrong := list(_of_components(plain_tree(config), skipped=())):
        raise UserError("\n".join(wrong))


def _of_components(
    node: Any, key: str = "", skipped: Sequence[Kind | None] = (None, LOGGER)
) -> Iterator[str]:
    """What is wrong with the components below a node of a config's tree.

    Losses without a dot, such as `sigmoid`, are the recipe's own. Of the kinds that are skipped, no
    place asks for None, and to look at a logger imports torchtune, which takes seconds.
    """
    path = node.get("_component_") if isinstance(node, dict) else None
    if path is not None:
        if kind_at(key) in skipped or ("." not in str(path) and key.startswith("loss")):
            return
        try:
            as_component(node, key).check(key, provided=None)
        except UserError as error:
            yield from str(error).split("\n")
    elif isinstance(node, dict):
        for name, entry in node.items():
            yield from _of_components(entry, join_key(key, str(name)), skipped)
    elif isinstance(node, list):
        for at, entry in enumerate(node):
            yield from _of_components(entry, f"{key}[{at}]", skipped)


def _escape(text: str) -> str:
    """Escapes `${`, which would be an interpolation when the text is read again."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
