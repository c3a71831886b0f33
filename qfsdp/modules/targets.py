"""The linears of a decoder that a config selects by `targets`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, cast

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
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_qkvz",
    "out_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "input_linear",
    "down_proj",
    "output_linear",
    "lm_head",
)
# Further names of linears in models of transformers, which have many more.
HUB_NAMES = (
    *("in_proj_a", "in_proj_b", "in_proj_ba", "in_proj", "x_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("w1", "w2", "w3", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2"),
    *("per_layer_input_gate", "per_layer_projection"),
)
# Routers of mixtures.
ROUTER_NAMES = ("gate", "router")
# Linears of few rows, which are never quantized. They are adapted only if adapter.targets names
# them: routers, gates of shared experts, steps of recurrent layers.
FEW_ROWS = (*ROUTER_NAMES, "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")


def check_targets(key: str, targets: str | list[str], few_rows: bool = False) -> None:
    """Raises `UserError` unless `targets` is "all-linear" or a non-empty list of names of
    `LINEAR_NAMES`, `HUB_NAMES` and, with `few_rows`, `FEW_ROWS` (a list may hold "all-linear"
    too: `[all-linear, lm_head]`)."""
    names = [targets] if isinstance(targets, str) else targets
    known = [ALL_LINEAR, *LINEAR_NAMES, *(FEW_ROWS if few_rows else ())]
    if not names:
        raise UserError(f"{key}: [] names no linear; expected {ALL_LINEAR!r} or some of {known}")
    for name in names:
        if "," in name:
            raise UserError(f"{key}: {name!r} is no list; expected '{key}=[{name}]'")
        if name not in known and name not in HUB_NAMES:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
            raise UserError(
                f"{key}: {name!r} is not a linear of the decoder; did you mean {near!r}? "
                f"Expected some of {', '.join(known)}"
            )


def target_modules(
    model: nn.Module, targets: str | list[str], kind: type[nn.Module] | tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module of type `kind` that `targets` selects, in model order.

    "all-linear" selects every linear of every decoder layer, but neither `lm_head` nor `FEW_ROWS`.
    A model of transformers says which linears these are (`HubDecoder.linears`, `few_rows`).
    """
    names = {targets} if isinstance(targets, str) else set(targets)
    stand: Sequence[str] | None = getattr(model, "linears", None)
    if ALL_LINEAR in names and stand is None:
        names |= set(LINEAR_NAMES) - {"lm_head"}
    few = getattr(model, "few_rows", ())
    allowed = None if stand is None else {*stand, *few, "lm_head"}
    chosen = set(stand or ()) if ALL_LINEAR in names else set()
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kind) and (allowed is None or name in allowed)
        if name in chosen or name.rpartition(".")[2] in names
    ]


def linears_of(model: nn.Module, few_rows: bool = False) -> list[str]:
    """Names of the linears that a model has, whatever they have become; with `few_rows`, also of
    those that have few rows."""
    if (stand := getattr(model, "linears", None)) is not None:
        few = cast(Any, model).few_rows if few_rows else ()
        return [*dict.fromkeys(name.rpartition(".")[2] for name in (*stand, *few)), "lm_head"]
    found = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return [n for n in (*LINEAR_NAMES, *(FEW_ROWS if few_rows else ())) if n in found]


def check_present(
    key: str, targets: str | list[str], model: nn.Module, few_rows: bool = False
) -> None:
    """Raises `UserError` if `targets` has a name that is not one of `linears_of`."""
    known = [ALL_LINEAR, *linears_of(model, few_rows)]
    for name in [targets] if isinstance(targets, str) else targets:
        if "," in name:
            raise UserError(f"{key}: {name!r} is no list; expected '{key}=[{name}]'")
        if name not in known:
            raise UserError(
                f"{key}: {name!r} is not a linear of this model; expected some of "
                f"{', '.join(known)}"
            )


def adapted_modules(
    model: nn.Module, targets: str | list[str], kind: type[nn.Module] | tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module]]:
    """`target_modules` of `adapter.targets`, without those that are quantized only
    (`HubDecoder.not_adapted`) and experts of transformers' models, which have longer names
    (`places.py`). Raises `UserError` if `targets` names nothing but these."""
    experts = getattr(model, "expert_linears", ())
    kept = {*getattr(model, "not_adapted", ()), *experts}
    found = [(n, m) for n, m in target_modules(model, targets, kind) if n not in kept]
    names = {n.rpartition(".")[2] for n in kept} - {n.rpartition(".")[2] for n, _ in found}
    for name in [targets] if isinstance(targets, str) else targets:
        if name in names:
            more = "or experts.gate_up_proj and experts.down_proj"
            raise UserError(
                f"adapter.targets: {name!r} also names experts of this model; expected targets "
                f"without it, {more if experts else 'as they are not adapted'}"
            )
    return found


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module with the dotted `name` in `model` by `module`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
