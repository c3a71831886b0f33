"""Linears with the same input as one operation, and A and B as they are multiplied.

A `LowRankLinear` casts A, multiplies B by the scaling and DoRA's ratio, and casts it. They change
once per update. Where parameters are whole on a rank, `prepare` does this once for the linears
whose factors have changed, at the start of `Decoder.forward`. Where FSDP2 gathers parameters,
copies would have to be sharded and gathered with them: there every pass does it.

A copy is current if no optimizer has made a step since, and the version counters of its parameters,
which count writes, are the same (fused optimizers do not count theirs). So loops of your own and
loaded checkpoints need no call. Copies keep their addresses, as captured graphs need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from qfsdp.modules.low_rank.copies import Copies, add_copies, write_copies
from qfsdp.modules.low_rank.product import MOST_TOGETHER, Ready, adapted_linears, with_row_gradient


def outputs(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """`[linear(x) for linear in linears]`; as one operation if their adapters are alike."""
    if 1 < len(linears) <= MOST_TOGETHER and _alike(linears):
        return low_rank_outputs(x, linears)
    return [linear(x) for linear in linears]


def _alike(linears: Sequence[Any]) -> bool:
    """Whether the linears may be one operation. FSDP2's hooks on a linear and those of a second
    look must run, and dropout gives every linear an input of its own."""
    for linear in linears:
        if not _of_one_kind(linear, linears[0]) or isinstance(linear, FSDPModule):
            return False
        if linear.dropout and linear.training:
            return False
        if not torch.compiler.is_compiling() and _is_watched(linear):
            return False
    return True


def _of_one_kind(linear: Any, other: Any) -> bool:
    """Whether both are `LowRankLinear`s, of the same format, rank and method."""
    if not all(getattr(module, "multiplies_together", False) for module in (linear, other)):
        return False
    return bool(
        type(linear.weight) is type(other.weight)
        and linear.weight.dtype == other.weight.dtype
        and linear.lora_B.size(1) == other.lora_B.size(1)
        and linear.scaling == other.scaling
        and linear.fp8 == other.fp8
        and (linear.magnitude is None) == (other.magnitude is None)
        and linear.is_reference == other.is_reference
    )


def _is_watched(linear: nn.Module) -> bool:
    return bool(linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear))


def low_rank_outputs(x: Tensor, linears: Sequence[Any]) -> list[Tensor]:
    """The outputs of `LowRankLinear`s that are alike."""
    given = [linear._adapter() for linear in linears]
    a, b, (scaling, *_), ratios = zip(*given, strict=True)
    ready = _ready(linears, x.dtype)
    made = adapted_linears(
        x,
        [linear.weight for linear in linears],
        a,
        b,
        scaling,
        () if ratios[0] is None else ratios,
        linears[0]._dropped(x),
        ready,
        linears[0].fp8,
    )
    for at, linear in enumerate(linears):
        if linear.magnitude is not None and not linear.is_reference:
            made[at] = with_row_gradient(made[at], linear.magnitude)
        if linear.bias is not None:  # DoRA must not scale the bias
            made[at] = made[at] + linear.bias
    return made


# ---- A and B, ready to be multiplied -------------------------------------------------------------


def _ready(linears: Sequence[Any], dtype: torch.dtype) -> Ready | None:
    """The copies of these linears, if they are current."""
    copies: list[Copies] = []
    for linear in linears:
        if linear.copies is None or linear.copies.a.dtype != dtype or linear.is_reference:
            return None
        # Compiled code cannot ask; `prepare` runs before it.
        if not torch.compiler.is_compiling() and linear.copied != versions(linear):
            return None
        copies.append(linear.copies)
    a = copies[0].a if len(copies) == 1 else linears[0].stacked_a
    if a is None or a.size(0) != len(copies) * copies[0].b.size(1):
        return None
    ratios = tuple(one.ratio for one in copies if one.ratio is not None)
    return Ready(a, tuple(one.b for one in copies), ratios)


_steps = [0]  # of all optimizers of this process


def _count(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count)


def versions(linear: Any) -> list[tuple[int, int]]:
    """Changes whenever a number of the adapter may have changed."""
    params = (linear.lora_A, linear.lora_B, linear.magnitude, linear.weight_norm)
    return [(0, _steps[0]), *((id(p), p._version) for p in params if p is not None)]


@torch.no_grad()
def prepare(model: nn.Module, *_: Any) -> None:
    """Writes the copies of all adapters that have changed, in few launches; a forward pre-hook of
    the decoder."""
    stale = []
    for group in _groups(model):
        if not _wants_copies(group):
            continue
        if group[0].copies is None:
            add_copies(group)
        stale += [linear for linear in group if linear.copied != versions(linear)]
    if not stale:
        return
    for linear in stale:
        linear.copied = versions(linear)
    write_copies(stale)


def _wants_copies(group: Sequence[Any]) -> bool:
    """Whether copies of these linears are of use: fp32 is multiplied as it is, and parameters of
    FSDP2 change their place."""
    params = [param for m in group for param in (m.weight, m.lora_A, m.lora_B)]
    moves = any(isinstance(param, DTensor) or param.is_inference() for param in params)
    return group[0].weight.dtype != torch.float32 and not moves


def _groups(model: nn.Module) -> Iterator[list[Any]]:
    """The `LowRankLinear`s that are multiplied together, and the others alone. A module says by
    `inner` which of its linears have the same input."""
    for module in model.modules():
        own = [m for m in module.children() if getattr(m, "multiplies_together", False)]
        if not own:
            continue
        inner = [module.get_submodule(name) for name in vars(module).get("inner", ())]
        if 1 < len(inner) <= MOST_TOGETHER and all(_of_one_kind(m, inner[0]) for m in inner):
            yield inner
            own = [m for m in own if m not in inner]
        yield from ([m] for m in own)
