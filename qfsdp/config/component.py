"""Components: classes and functions that a config names by their import path.

A component is a mapping with `_component_` and arguments, in torchtune's form:

    optimizer:
      _component_: torch.optim.AdamW
      lr: 1e-4
"""

from __future__ import annotations

import dis
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from qfsdp.common.errors import UserError, refused_variable
from qfsdp.common.messages import (
    TYPE_WORDS,
    did_you_mean,
    first_line,
    is_union,
    join_key,
    nearest,
    not_valid,
)
from qfsdp.config.component_types import check_built, check_kind, check_path, kind_at
from qfsdp.config.foreign_keys import answer_to, in_words


@dataclass
class Component:
    """A class or function by its import path, with arguments from the config.

    Fields:
        path: the dotted path.
        kwargs: the arguments.
        key: the place in the config that the component was read from; "" for none.

    In the methods, `key` is the component's place in the config, for error messages.
    """

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: str = field(default="", compare=False, repr=False)

    def resolve(self, key: str = "") -> Any:
        """Imports and returns the object; modules of the working directory can be imported. Raises
        UserError if it does not exist, its module fails to import, or it is not of the kind that
        its place asks for (`qfsdp.config.component_types`)."""
        key = key or self.key
        check_path(join_key(key, "_component_"), self.path)
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
        except (Exception, SystemExit) as error:  # an import may raise anything, or end the program
            place, missing = join_key(key, "_component_"), getattr(error, "name", None)
            if isinstance(error, ModuleNotFoundError) and f"{self.path}.".startswith(f"{missing}."):
                hint = in_words(answer_to(key, self.path)) if len(names) == 1 else ""
                hint = hint or did_you_mean(_nearest_path(names, at, found))
                raise UserError(f"{place}: '{self.path}' does not exist{hint}") from None
            if refused_variable(error):  # told where the process ends
                raise
            reason = f"importing '{self.path}' failed: {first_line(error)}"
            raise UserError(f"{place}: {reason}") from error
        check_kind(join_key(key, "_component_"), self.path, found, kind_at(key))
        return found

    def check(self, key: str, provided: Sequence[str] | None = ()) -> None:
        """Compares the arguments with the object's signature, without calling it.

        Args:
            key: the component's place in the config.
            provided: arguments that the recipe passes itself, so the config may not give them.
                None if they are not known; then no argument counts as missing.

        Raises:
            UserError: as `resolve`; or an argument is unknown, missing or also passed by the
                recipe, or its value does not fit the annotation.
        """
        target = self.resolve(key)
        for name in self.kwargs:
            if name in (provided or ()):
                raise UserError(f"{key}.{name}: the recipe passes this argument itself; remove it")
        parameters = _parameters(target)
        if parameters is None:
            return
        takes_any = _takes_any(target, parameters)
        named = passed_by_name(target)
        kind = kind_at(key)
        if provided and kind and kind.passed and kind.passed not in named and not takes_any:
            gives = f"takes no argument '{kind.passed}', which the recipe passes"
            raise UserError(f"{key}._component_: '{self.path}' {gives}; expected {kind.words}")
        wrong = list[str]()
        for name, value in self.kwargs.items():
            if (key, name, value) == ("optimizer", "lr", "auto"):
                continue  # qfsdp.training.learning_rate chooses a number
            if name in named:
                try:
                    _check_argument(f"{key}.{name}", value, named[name])
                except UserError as error:
                    wrong.append(str(error))
        further = further_keys(target)
        known = {*named, *(entry.name for entry in fields(further))} if further else set(named)
        unknown = [name for name in self.kwargs if name not in known]
        if unknown and not takes_any:
            wrong.append(str(self._not_taken(key, unknown, sorted(known - set(provided or ())))))
        if wrong:
            raise UserError("\n".join(wrong))
        for name, parameter in named.items():
            required = parameter.default is inspect.Parameter.empty
            if required and provided is not None and name not in {*self.kwargs, *provided}:
                raise UserError(f"{key}.{name} is required by '{self.path}'")

    def _not_taken(self, key: str, unknown: list[str], known: list[str]) -> UserError:
        """The error for arguments that the object does not take.

        Often they belong to the component that another word has replaced, as after
        `optimizer._component_=other`. So the message has the words that remove them.
        """
        name, remove = unknown[0], " ".join(f"~{key}.{name}" for name in unknown)
        if len(unknown) > 1:
            names = ", ".join(f"'{name}'" for name in unknown)
            return UserError(
                f"{key}: '{self.path}' takes no arguments {names}; remove them: {remove}"
            )
        answer = answer_to(f"{key}.{name}") or answer_to(name)
        foreign = in_words(answer) if answer != f"{key}.{name}" else ""
        hint = foreign or did_you_mean(nearest(name, known)) or f"; remove it: {remove}"
        return UserError(f"{key}.{name}: '{self.path}' takes no argument '{name}'{hint}")

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the object with `args`, the config's arguments and `kwargs` (which win). Raises
        UserError: the object comes from a config, is not qfsdp's and raises anything; or it returns
        something that its place in the config cannot use."""
        try:
            built = self.call(*args, **kwargs)
        except Exception as error:
            of_qfsdp = not self.key or self.path.startswith("qfsdp.")
            if of_qfsdp or isinstance(error, UserError | MemoryError):
                raise
            raise UserError(f"{self.key}: '{self.path}' failed: {_where(error)}") from error
        check_built(self.key, self.path, built, kind_at(self.key))
        return built

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Like `build`, but exceptions pass and the result is not checked."""
        return self.resolve()(*args, **{**self.kwargs, **kwargs})


FURTHER_KEYS = "further_keys"


def further_keys(target: Any) -> Any:
    """The dataclass of the keys that a config may give a function besides its arguments, or None.

    Who builds the component takes these keys off; see `qfsdp.data.reading`.
    """
    while isinstance(target, partial):
        target = target.func
    return getattr(target, FURTHER_KEYS, None)


def _where(error: Exception) -> str:
    """ "ValueError: ... (file.py, line 3)": an exception in one line, with its place."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({at.filename}, line {at.lineno})"


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


def passed_by_name(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that a config can give, by name; none for builtins without a signature."""
    parameters = _parameters(target) or {}
    return {name: p for name, p in parameters.items() if p.kind not in _NOT_BY_NAME}


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


def _takes_any(target: Any, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether the object takes arguments of any name, and its code reads them.

    torchtune's TensorBoardLogger takes `**kwargs` and does nothing with them: a mistyped name would
    pass unnoticed.
    """
    name = next((n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    if name is None or not inspect.isfunction(function):
        return name is not None
    return any(step.argval == name for step in dis.get_instructions(function))


def _check_argument(key: str, value: Any, parameter: inspect.Parameter) -> None:
    """Compares a value from YAML with its annotation, where that says what YAML can give."""
    annotation = parameter.annotation
    members = get_args(annotation) if is_union(annotation) else (annotation,)
    choices = [repr(c) for kind in members if get_origin(kind) is Literal for c in get_args(kind)]
    words = [_WORDS[base] for kind in members if (base := get_origin(kind) or kind) in _WORDS]
    words += [f"one of {', '.join(choices)}"] if choices else []
    if not words or (value is None and parameter.default is None):
        return
    if not any(_fits(value, kind) for kind in members):
        raise not_valid(key, value, " or ".join(dict.fromkeys(words)))
    if isinstance(value, int) and value < (least := _LEAST.get(key, value)):
        raise not_valid(key, value, f"an integer of at least {least}")


# Least values, which neither torchtune's components nor ours check.
_LEAST = {
    "tokenizer.max_seq_len": 1,
    "lr_scheduler.num_warmup_steps": 0,
    "lr_scheduler.num_cycles": 0,
}

_WORDS = {**TYPE_WORDS, Path: "a path", list: "a list", tuple: "a list"}


def _fits(value: Any, kind: Any) -> bool:
    base = get_origin(kind) or kind
    if base is Literal:
        return value in get_args(kind)
    if base is float:
        return type(value) in (int, float)
    if base in (list, tuple):
        return type(value) is list
    if base in (str, Path):
        return type(value) is str
    if base in (bool, int, dict, types.NoneType):
        return type(value) is base
    # Any other class, such as the Tensor of `lr: float | Tensor`, is not made from text or `true`.
    # What is no class (Any, a TypeVar, a string that cannot be evaluated) may take everything.
    return not (isinstance(base, type) and type(value) in (str, bool)) or issubclass(
        type(value), base
    )
