"""Copies of A and B as they are multiplied; `grouped` says when they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qfsdp.modules.low_rank.product import scaled_b

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
    """Writes the copies of `LowRankLinear`s in few launches."""
    torch._foreach_copy_([m.copies.a for m in linears], [m.lora_A for m in linears])
    numbers, some = 0, []
    for linear in linears:
        some.append(linear)
        numbers += linear.lora_B.numel()
        if numbers > NUMBERS_AT_A_TIME or linear is linears[-1]:
            torch._foreach_copy_([m.copies.b for m in some], [_scaled(m) for m in some])
            numbers, some = 0, []


def _scaled(linear: Any) -> Tensor:
    """scaling * ratio * B in fp32; writes the copy of the ratio."""
    ratio = linear.copies.ratio
    if ratio is not None:
        torch.div(linear.magnitude, linear.weight_norm, out=ratio)
    return scaled_b(linear.lora_B, ratio, linear.scaling, torch.float32)


def add_copies(group: Sequence[Any]) -> None:
    """Gives linears with one input their copies, unset."""
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
