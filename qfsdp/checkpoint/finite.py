"""Finds numbers that are not finite in the state of a run, before it is saved or restored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qfsdp.checkpoint.state import HOST, StackedTensors, rank_entry
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.finite import is_finite


def not_finite(entries: dict[str, Any], rank: int) -> str | None:
    """The first tensor of `Stager.copy` with NaN or infinity in this rank's part, or None."""
    stacks = {key: StackedTensors(**fields) for key, fields in entries[HOST]["stacks"].items()}
    local = {key: local_part(entries[key]) for key in stacks}
    return first_not_finite(stacks, local, entries[rank_entry(rank)]["alone"])


def first_not_finite(
    stacks: dict[str, StackedTensors],
    local: dict[str, Tensor],
    alone: dict[str, dict[str, dict[str, Any]]],
) -> str | None:
    """As `not_finite`, of what `state.read_state` has read."""
    for key, stack in stacks.items():
        if not is_finite(local[key]):
            parts = zip(stack.names, local[key].unbind(), strict=True)
            return next(f"{stack.field} of {name}" for name, t in parts if not is_finite(t))
    for name, fields in alone.items():
        for field, kept in fields.items():
            if not all(map(is_finite, kept["inner"].values())):
                return f"{field} of {name}"
    return None
