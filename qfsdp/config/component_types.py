"""What each place of a config asks of its component, checked before the component is called.

A class is known by its bases and methods. A function is known by what it takes or says: it takes
what the recipe passes (a dataset's `tokenizer`), or its return annotation names a fitting class.
Parts of Python itself (`subprocess.Popen`, `os.remove`) are refused before they are imported.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args, get_origin

from qfsdp.common.errors import UserError
from qfsdp.common.messages import is_union


@dataclass(frozen=True)
class Kind:
    """What a place of the config asks of its component.

    Fields:
        words: what is expected, for messages.
        methods: that a class must have.
        base: the class that a class must derive from, as "module.Class"; None: any.
        passed: the first argument, which the recipe passes; "" for none.
        attributes: that the built object must have, besides the methods.
    """

    words: str
    methods: tuple[str, ...]
    base: str | None = None
    passed: str = ""
    attributes: tuple[str, ...] = ()

    def lacks(self, kind: Any) -> str:
        """What a class lacks, in words; "" if it fits."""
        if self.base is not None:
            module, _, name = self.base.rpartition(".")
            if not issubclass(kind, getattr(importlib.import_module(module), name)):
                return f"is no {self.base}"
        missing = [name for name in self.methods if not callable(getattr(kind, name, None))]
        return f"has no {missing[0]}" if missing else ""


OPTIMIZER = Kind("an optimizer", ("step",), "torch.optim.Optimizer", "params")
SCHEDULER = Kind(
    "a learning rate schedule", ("step",), "torch.optim.lr_scheduler.LRScheduler", "optimizer"
)
LOGGER = Kind("a metric logger with log_dict and close", ("log_dict", "close"))
TOKENIZER = Kind("a tokenizer with encode and pad_id", ("encode",), attributes=("pad_id",))
DATASET = Kind(
    "a map-style dataset (__len__, __getitem__)", ("__len__", "__getitem__"), passed="tokenizer"
)
_PLACES = {
    r"optimizer": OPTIMIZER,
    r"lr_scheduler": SCHEDULER,
    r"metric_logger(\[\d+\])?": LOGGER,
    r"tokenizer": TOKENIZER,
    r"dataset|loss\.[^.]+|(.+\.)?sets\.[^.]+": DATASET,
}


def kind_at(key: str) -> Kind | None:
    """The kind that a key of the config asks for; None for a key that no recipe of qfsdp has."""
    return next((kind for place, kind in _PLACES.items() if re.fullmatch(place, key)), None)


def check_path(place: str, path: str) -> None:
    """Refuses a dotted path into Python itself, before anything is imported. Raises UserError;
    `place` is the path's key in the config."""
    if path.partition(".")[0] in sys.stdlib_module_names:
        raise _of_python(place, path)


def check_kind(place: str, path: str, target: Any, kind: Kind | None) -> None:
    """Checks the class or function at `path` without calling it; None allows all but Python's own.
    Raises UserError; `place` is the path's key in the config."""
    if not callable(target):
        raise UserError(f"{place}: '{path}' cannot be called")
    while isinstance(target, partial):
        target = target.func
    if (getattr(target, "__module__", None) or "builtins").split(".")[0] in sys.stdlib_module_names:
        raise _of_python(place, path)  # reached through another module: torch.os.remove
    if kind is None:
        return
    if inspect.isclass(target):
        if lacks := kind.lacks(target):
            raise UserError(f"{place}: '{path}' {lacks}; expected {kind.words}")
        return
    try:
        signature = inspect.signature(target, eval_str=True)
    except Exception:  # a builtin without a signature, or annotations that cannot be evaluated
        signature = inspect.Signature()
    classes = _returned_classes(signature.return_annotation)
    if classes and all(kind.lacks(one) for one in classes):
        returned = f"'{path}' returns a {classes[0].__name__}, which {kind.lacks(classes[0])}"
        raise UserError(f"{place}: {returned}; expected {kind.words}")
    if not classes and kind.passed not in signature.parameters:
        takes = f"takes no {kind.passed} and " if kind.passed else ""
        raise UserError(
            f"{place}: '{path}' is a function that {takes}has no return annotation; expected one "
            f"that names the class of {kind.words}"
        )


def _returned_classes(annotation: Any) -> list[type]:
    """The classes that a return annotation names; none if it says nothing."""
    members = get_args(annotation) if is_union(annotation) else (annotation,)
    bases = [get_origin(member) or member for member in members]
    silent = (inspect.Signature.empty, Any, object, type(None))
    return [base for base in bases if inspect.isclass(base) and base not in silent]


def check_built(key: str, path: str, built: Any, kind: Kind | None) -> None:
    """Checks what a component has returned; raises UserError."""
    if kind is None or (kind is DATASET and hasattr(built, "shuffle_buffer")):  # a stream
        return
    missing = [name for name in kind.attributes if not hasattr(built, name)]
    lacks = kind.lacks(type(built)) or (f"has no {missing[0]}" if missing else "")
    if lacks:
        returned = f"'{path}' returned a {type(built).__name__}, which {lacks}"
        raise UserError(f"{key}: {returned}; expected {kind.words}")


def _of_python(place: str, path: str) -> UserError:
    return UserError(
        f"{place}: '{path}' is a part of Python itself; expected a class or function of torch, "
        "torchtune, qfsdp, another package or your own file"
    )
