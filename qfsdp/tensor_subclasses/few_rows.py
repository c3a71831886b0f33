"""Products of few rows by NF4 weights, computed from the codes by bitsandbytes' operator for CPUs.

A generated token needs every weight once. The operator multiplies codes as they are, so no weight
is written in bf16: one row by 4096 x 4096 weights took 0.5 instead of 10.2 ms, ten rows 2.7 instead
of 10.6 (one thread of a Zen 4). It has three conditions:

* the CPU multiplies bf16 (AVX-512), and so does the model;
* the codes lie in an order of its own: a second copy, made at the first product (0.53 bytes a
  weight);
* absmax is rounded to bf16, so weights are off by up to 0.2 %. Therefore only models that generate
  text use it, and only for few rows. Losses and long prompts are computed as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.four_bit import BLOCK, table
from qfsdp.tensor_subclasses.nf4_dequantize import absmax_products
from qfsdp.tensor_subclasses.nf4_levels import DYNAMIC_LEVELS, NF4_LEVELS

MOST_ROWS = 32
ROWS_TOGETHER = 32
"""Weights of so many rows of one column lie side by side in the operator's order."""

_generating = False


@contextmanager
def generating() -> Iterator[None]:
    """Context in which `product` computes what it can."""
    global _generating
    before, _generating = _generating, True
    try:
        yield
    finally:
        _generating = before


def use_for(model: nn.Module) -> None:
    """Lets `product` take the NF4 weights of `model` on the CPU, if the operator is right here.
    bitsandbytes must be imported."""
    held = [p for p in model.parameters() if isinstance(p.data, nf4.NF4Tensor)]
    fitting = [p for p in held if _fits(p.data)]
    if fitting and _is_right():
        for param in fitting:
            param.codes_in_order = []  # type: ignore[attr-defined]


def product(x: Tensor, weight: Tensor) -> Tensor | None:
    """x `[..., cols]` @ weight.T, or None if the operator does not take x or the weight."""
    if torch.compiler.is_compiling() or not _generating or x.dtype != torch.bfloat16:
        return None
    made: list[Tensor] | None = getattr(weight, "codes_in_order", None)
    if made is None or x.numel() > MOST_ROWS * x.size(-1):
        return None
    if not made:
        made.extend(_in_order(weight))
    codes, absmax = made
    return _multiply(x, codes, absmax, weight.shape)


def _fits(weight: Tensor) -> bool:
    rows, cols = weight.shape
    return weight.device.type == "cpu" and rows % ROWS_TOGETHER == 0 and cols % BLOCK == 0


def _in_order(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[rows, cols / 2]` and absmax bf16 `[cols / 64, rows]` for the operator.

    The codes of 32 rows by two columns are adjacent. Of these 64 codes the first 32 are in the low
    halves of 32 bytes, the others in the high halves.
    """
    assert isinstance(weight, nf4.NF4Tensor)
    (rows, cols), (scales, offset) = weight.shape, weight.metadata
    codes, absmax_codes = weight.qdata.split([cols // 2, cols // BLOCK], dim=1)
    first = weight.row_offset * absmax_codes.size(1)
    dynamic = table(DYNAMIC_LEVELS, codes)
    absmax = absmax_products(absmax_codes, scales, dynamic, first) + offset
    pairs = torch.stack([codes >> 4, codes & 15], dim=-1)  # [rows, cols / 2, 2]
    grouped = pairs.view(-1, ROWS_TOGETHER, cols // 2, 2).transpose(1, 2)
    low, high = grouped.reshape(-1, 2, ROWS_TOGETHER).unbind(1)
    return ((high << 4) | low).view(rows, cols // 2), absmax.to(torch.bfloat16).t().contiguous()


def _multiply(x: Tensor, codes: Tensor, absmax: Tensor, shape: torch.Size) -> Tensor:
    levels = table(NF4_LEVELS, codes)
    operator = torch.ops.bitsandbytes.gemv_4bit.default
    made: Tensor = operator(x.contiguous(), codes, shape, absmax, levels, BLOCK)
    return made


def _is_right() -> bool:
    """Whether the operator multiplies by the weights, but for the rounding of absmax."""
    weight = nf4.quantize(torch.linspace(-1, 1, 64 * 128).sin().view(64, 128), torch.bfloat16)
    x = torch.linspace(-1, 1, 3 * 128, dtype=torch.bfloat16).view(3, 128)
    try:
        found = _multiply(x, *_in_order(weight), weight.shape)
    except Exception:  # it is built for another machine, or has another API
        return False
    expected = x.float() @ weight.dequantize(torch.float32).t()  # type: ignore[operator]
    return bool((found - expected).abs().max() < 0.02 * expected.abs().max())
