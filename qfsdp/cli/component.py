"""TODO cli.component."""

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
            place, missing = join_key(key, "_component_"), getattr(error, "name", None)
            if isinstance(error, ModuleNotFoundError) and f"{self.path}.".startswith(f"{missing}."):
                hint = did_you_mean(_nearest_path(names, at, found))
                raise UserError(f"{place}: '{self.path}' does not exist{hint}") from None
            reason = f"importing '{self.path}' failed: {first_line(error)}"
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
    """The dotted path with its wrong part, `names[at]`, replaced by what `parent` does have."""
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
    """The parameters with evaluated annotations where that works; None for custom_op builtins."""
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
    members = get_args(annotation) if is_union(annotation) else (annotation,)
    wanted = [kind for kind in (bool, int, float) if kind in members]
    takes_text = any(not isinstance(kind, type) or issubclass(str, kind) for kind in members)
    if isinstance(value, str) and wanted and not takes_text:
        raise not_valid(key, value, " or ".join(TYPE_WORDS[kind] for kind in wanted))
