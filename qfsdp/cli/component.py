"""Components: classes and functions that a config names by their import path.

A component is a mapping with `_component_` and arguments, in torchtune's form:

    optimizer:
      _component_: torch.optim.AdamW
      lr: 1e-4
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from qfsdp.cli.errors import UserError
from qfsdp.cli.messages import (
    TYPE_WORDS,
    did_you_mean,
    first_line,
    is_union,
    join_key,
    nearest,
    not_valid,
)


@dataclass
class Component:
    """A class or function by its import path, with arguments from the config.

    Fields:
        path: the dotted path.
        kwargs: the arguments.

    In the methods, `key` is the component's place in the config, for error messages.
    """

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def resolve(self, key: str = "") -> Any:
        """Imports and returns the object; modules of the working directory can be imported.

        Raises UserError if it does not exist or its module fails to import.
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
            place, missing = join_key(key, "_component_"), getattr(error, "name", None)
            if isinstance(error, ModuleNotFoundError) and f"{self.path}.".startswith(f"{missing}."):
                hint = did_you_mean(_nearest_path(names, at, found))
                raise UserError(f"{place}: '{self.path}' does not exist{hint}") from None
            reason = f"importing '{self.path}' failed: {first_line(error)}"
            raise UserError(f"{place}: {reason}") from error
        return found

    def check(self, key: str, provided: Sequence[str] | None = ()) -> None:
        """Compares the arguments with the object's signature, without calling it.

        Args:
            key: the component's place in the config.
            provided: arguments that the recipe passes itself, so the config may not give them.
                None if they are not known; then no argument counts as missing.

        Raises:
            UserError: an argument is unknown, missing or also passed by the recipe, or it is a
                string where the signature has a number or a bool.
        """
        target = self.resolve(key)
        if not callable(target):
            raise UserError(f"{join_key(key, '_component_')}: '{self.path}' cannot be called")
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
                    + did_you_mean(nearest(name, set(named) - set(provided or ())))
                )
        for name, parameter in named.items():
            required = parameter.default is inspect.Parameter.empty
            if required and provided is not None and name not in {*self.kwargs, *provided}:
                raise UserError(f"{key}.{name} is required by '{self.path}'")

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the object with `args`, the config's arguments and `kwargs` (which win)."""
        return self.resolve()(*args, **{**self.kwargs, **kwargs})


def _nearest_path(names: list[str], at: int, parent: Any) -> str | None:
    """The path with `names[at]`, which does not exist, replaced by the nearest name in `parent`."""
    paths = getattr(parent, "__path__", []) if at else None
    known = [*dir(parent)] if at else []
    near = nearest(names[at], known + [module.name for module in pkgutil.iter_modules(paths)])
    return near and ".".join([*names[:at], near, *names[at + 1 :]])


_NOT_BY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters, with evaluated annotations if possible; None for builtins without any."""
    try:
        return inspect.signature(target, eval_str=True).parameters
    except Exception:  # evaluating an annotation runs code of the component
        pass
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def _check_argument(key: str, value: Any, annotation: Any) -> None:
    # Finds one mistake, which YAML invites: text in place of a number. An annotation that is not
    # a class (Any, TypeVar, Literal, an unevaluated string) may accept text.
    members = get_args(annotation) if is_union(annotation) else (annotation,)
    wanted = [kind for kind in (bool, int, float) if kind in members]
    takes_text = any(not isinstance(kind, type) or issubclass(str, kind) for kind in members)
    if isinstance(value, str) and wanted and not takes_text:
        raise not_valid(key, value, " or ".join(TYPE_WORDS[kind] for kind in wanted))
