"""The linears of a decoder that a config selects by `targets`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from qfsdp.common.errors import UserError

ALL_LINEAR = "all-linear"
# Of all families. Some have one linear for queries, keys and values, or for gate and up.
LINEAR_NAMES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "input_linear",
    "down_proj",
    "output_linear",
    "lm_head",
)
# Routers of mixtures. They are adapted only if adapter.targets names them.
ROUTER_NAMES = ("gate", "router")


def check_targets(key: str, targets: str | list[str], routers: bool = False) -> None:
    """Raises `UserError` unless `targets` is "all-linear" or a non-empty list of names of
    `LINEAR_NAMES` and, with `routers`, `ROUTER_NAMES` (a list may hold "all-linear" too:
    `[all-linear, lm_head]`)."""
    names = [targets] if isinstance(targets, str) else targets
    known = [ALL_LINEAR, *LINEAR_NAMES, *(ROUTER_NAMES if routers else ())]
    if not names:
        raise UserError(f"{key}: [] names no linear; expected {ALL_LINEAR!r} or some of {known}")
    for name in names:
        if "," in name:
            raise UserError(f"{key}: {name!r} is no list; expected '{key}=[{name}]'")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
            raise UserError(
                f"{key}: {name!r} is not a linear of the decoder; did you mean {near!r}? "
                f"Expected some of {', '.join(known)}"
            )


def target_modules(
    model: nn.Module, targets: str | list[str], kind: type[nn.Module] | tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module of type `kind` that `targets` selects, in model order.

    "all-linear" selects every linear of every decoder layer, but neither `lm_head` nor routers.
    """
    names = {targets} if isinstance(targets, str) else set(targets)
    if ALL_LINEAR in names:
        names |= set(LINEAR_NAMES) - {"lm_head"}
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kind) and name.rpartition(".")[2] in names
    ]


def linears_of(model: nn.Module, names: Sequence[str] = LINEAR_NAMES) -> list[str]:
    """Those of `names` that a model has, whatever its linears have become."""
    found = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return [name for name in names if name in found]


def check_present(
    key: str, targets: str | list[str], model: nn.Module, names: Sequence[str] = LINEAR_NAMES
) -> None:
    """Raises `UserError` if `targets` has a name that is not among `names`, or not in the model."""
    known = [ALL_LINEAR, *linears_of(model, names)]
    for name in [targets] if isinstance(targets, str) else targets:
        if "," in name:
            raise UserError(f"{key}: {name!r} is no list; expected '{key}=[{name}]'")
        if name not in known:
            raise UserError(
                f"{key}: {name!r} is not a linear of this model; expected some of "
                f"{', '.join(known)}"
            )


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module with the dotted `name` in `model` by `module`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
