"""Copies of A and B as they are multiplied, where parameters are whole on a rank.

A `LowRankLinear` casts A, multiplies B by the scaling and DoRA's ratio, and casts it. They change
once per update. So `prepare`, which runs before a decoder's forward, computes them once and keeps
them until they change. fp32 is multiplied as it is and has no copies. Parameters that FSDP2 gathers
have none either: copies would have to be sharded and gathered too, so there every pass computes.

A copy is current if no optimizer has made a step since, and the version counters of its parameters,
which count writes, are the same (fused optimizers do not count theirs). So loops of your own and
loaded checkpoints need no call. Copies keep their addresses, as captured graphs need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from qfsdp.modules.low_rank.product import MOST_TOGETHER, Ready, scaled_b

# B of some linears is scaled in fp32 at a time: 16 MB.
NUMBERS_AT_A_TIME = 1 << 22


class Copies(NamedTuple):
    """What a linear multiplies by.

    Fields:
        a: `[rank, in]`, rows of the matrix of all linears with this input, in the compute dtype.
        b: `[out, rank]`, scaling * ratio * B, in the compute dtype.
        ratio: fp32 `[out]`, DoRA's magnitude / norm; None with LoRA.
    """

    a: Tensor
    b: Tensor
    ratio: Tensor | None


def write_copies(linears: Sequence[Any]) -> None:
    """Writes the copies of `LowRankLinear`s in few launches, not some for each linear."""
    torch._foreach_copy_([m.copies.a for m in linears], [m.lora_A for m in linears])
    alike: dict[Any, list[Any]] = {}
    for m in linears:
        key = (m.lora_B.size(1), m.scaling, m.magnitude is None, m.lora_B.device)
        alike.setdefault(key, []).append(m)
    for group in alike.values():
        numbers, some = 0, []
        for linear in group:
            some.append(linear)
            numbers += linear.lora_B.numel()
            if numbers > NUMBERS_AT_A_TIME or linear is group[-1]:
                _write_b(some)
                numbers, some = 0, []


def _write_b(linears: Sequence[Any]) -> None:
    """Writes scaling * ratio * B, multiplied in fp32 as one matrix, and the ratios."""
    rows, ratio = [m.lora_B.size(0) for m in linears], None
    if linears[0].magnitude is not None:
        ratio = torch.cat([m.magnitude for m in linears])
        ratio /= torch.cat([m.weight_norm for m in linears])
        torch._foreach_copy_([m.copies.ratio for m in linears], ratio.split(rows))
    together = torch.cat([m.lora_B for m in linears])
    scaled = scaled_b(together, ratio, linears[0].scaling, torch.float32)
    torch._foreach_copy_([m.copies.b for m in linears], scaled.split(rows))


def add_copies(group: Sequence[Any]) -> None:
    """Gives linears with one input their copies, unset."""
    _count_steps()
    dtype, rank = group[0].weight.dtype, group[0].lora_B.size(1)
    a = torch.empty(
        len(group) * rank, group[0].lora_A.size(1), dtype=dtype, device=group[0].lora_A.device
    )
    group[0].stacked_a = a if len(group) > 1 else None
    for linear, rows in zip(group, a.split(rank), strict=True):
        ratio = None if linear.magnitude is None else torch.empty_like(linear.magnitude)
        linear.copies = Copies(rows, torch.empty_like(linear.lora_B, dtype=dtype), ratio)


def copies_in(module: nn.Module) -> Iterator[Tensor]:
    """The copies that the linears of a module hold."""
    for child in module.modules():
        copies: Copies | None = vars(child).get("copies")
        if copies is not None:
            yield from (tensor for tensor in copies if tensor is not None)


# ---- when they are written, and whether they are current -----------------------------------------


def ready_copies(linears: Sequence[Any], dtype: torch.dtype) -> Ready | None:
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


_steps = [0]  # of all optimizers of this process, since there are copies


@cache
def _count_steps() -> None:
    def count(*_: Any) -> None:
        _steps[0] += 1

    register_optimizer_step_post_hook(count)


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
    """Whether copies of these linears are of use."""
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
        inner: list[Any] = [module.get_submodule(name) for name in vars(module).get("inner", ())]
        if 1 < len(inner) <= MOST_TOGETHER and all(m in own and m.is_like(inner[0]) for m in inner):
            yield inner
            own = [m for m in own if m not in inner]
        yield from ([m] for m in own)
