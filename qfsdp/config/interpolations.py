"""Interpolations of a config (`${...}`): resolved within limits, and kept if they read the
environment, whose values may be secrets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.base import Container
from omegaconf.errors import OmegaConfBaseException

from qfsdp.common.errors import UserError
from qfsdp.common.printable import READ

MOST_STEPS = 5_000  # names looked up: twelve lines of ten each stand for 10**12
MOST_LENGTH = 1 << 20  # characters and values that these lookups give, in all
MULTIPLY = "the config's interpolations (${...}) multiply; expected fewer of them"
_PATHS = ("/", "~", ".")  # values that begin so are paths, which errors should name

Path = tuple[str | int, ...]


def resolve(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[Path, str]]:
    """The tree with every interpolation resolved, and those that read the environment, by place.

    Raises:
        UserError: they multiply beyond `MOST_STEPS` or `MOST_LENGTH`.
        OmegaConfBaseException, RecursionError: as OmegaConf raises.
    """
    if home := os.environ.get("XDG_CACHE_HOME"):  # the shipped configs read this variable
        os.environ.setdefault("QFSDP_CACHE", os.path.join(home, "qfsdp"))
    config = OmegaConf.create(tree)
    with _watched() as seen:
        resolved = _plain(config, [0])
        found = {}
        for path, written in _leaves(tree):
            if not (isinstance(written, str) and "${" in written):
                continue
            seen.clear()
            parent: Any = config
            for name in path[:-1]:
                parent = parent[name]
            value = parent[path[-1]]
            value = _plain(value, [0])
            if "oc.env" in seen:
                found[path] = written
                _note(value, written)
    return resolved, found


def _plain(node: Any, count: list[int]) -> Any:
    """`OmegaConf.to_container` within `MOST_LENGTH`; `count` has the values so far."""
    count[0] += 1
    if count[0] > MOST_LENGTH >> 2:
        raise UserError(MULTIPLY)
    if not isinstance(node, DictConfig | ListConfig):
        return node
    names: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
    values = (
        (name, "???" if OmegaConf.is_missing(node, name) else _plain(node[name], count))
        for name in list(names)
    )
    return dict(values) if isinstance(node, DictConfig) else [value for _, value in values]


def _note(value: Any, written: str) -> None:
    for _, text in _leaves(value):
        if isinstance(text, str) and text and not text.startswith(_PATHS):
            READ[text] = written


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Place and value of everything in a tree that is neither dict nor list."""
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for name, entry in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(entry, (*path, name))


@contextmanager
def _watched() -> Iterator[set[str]]:
    """The names of the resolvers that are called inside; counts what they and lookups give."""
    seen: set[str] = set()
    used = {"steps": 0, "length": 0}
    inner_lookup = Container._resolve_node_interpolation
    inner_call = Container._evaluate_custom_resolver

    def too_many() -> bool:
        return used["steps"] > MOST_STEPS or used["length"] > MOST_LENGTH

    def count(value: Any) -> None:
        used["steps"] += 1
        used["length"] += _length(value, MOST_LENGTH)
        if too_many():
            raise UserError(MULTIPLY)

    def lookup(self: Container, *args: Any, **kwargs: Any) -> Any:
        found = inner_lookup(self, *args, **kwargs)
        count(found)
        return found

    def call(self: Container, *args: Any, **kwargs: Any) -> Any:
        name = kwargs["inter_type"] if "inter_type" in kwargs else args[2]
        found = inner_call(self, *args, **kwargs)
        seen.add(name)
        if name == "oc.env":
            words = kwargs["inter_args_str"] if "inter_args_str" in kwargs else args[4]
            _note(getattr(found, "_value", lambda: found)(), f"${{oc.env:{words[0]}}}")
        count(found)
        return found

    with (
        patch.object(Container, "_resolve_node_interpolation", lookup),
        patch.object(Container, "_evaluate_custom_resolver", call),
    ):
        try:
            yield seen
        except OmegaConfBaseException as error:  # OmegaConf wraps what is raised inside
            if too_many():
                raise UserError(f"{error.full_key}: {MULTIPLY}") from None
            raise


def _length(node: Any, most: int) -> int:
    """The characters and values of a node as written, counted up to about `most`."""
    value = node._value() if hasattr(node, "_value") else node
    if isinstance(value, dict | list):
        total = len(value)
        for entry in value.values() if isinstance(value, dict) else value:
            total += _length(entry, most - total)
            if total > most:
                break
        return total
    return len(value) if isinstance(value, str) else 1
