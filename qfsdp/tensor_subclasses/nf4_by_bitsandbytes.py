"""NF4 to weights by bitsandbytes' operator for CPUs, in models that answer, where it is installed.

Decoding dequantizes every weight for every token. The operator has the bits of our kernel, and took
0.4 of its time in fp32 and 0.7 in bf16 (1536 x 576, CPU time of one thread of a busy Zen 3).
Importing bitsandbytes takes seconds, so a model must be worth it. Training keeps our kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from qfsdp.tensor_subclasses import few_rows, nf4_dequantize
from qfsdp.tensor_subclasses.four_bit import BLOCK, table
from qfsdp.tensor_subclasses.nf4 import NF4Tensor
from qfsdp.tensor_subclasses.nf4_levels import NF4_LEVELS

LEAST_WEIGHTS = 50_000_000  # of a model for which bitsandbytes is imported


def use_for(model: nn.Module) -> bool:
    """Has NF4 weights on the CPU dequantized by bitsandbytes from now on, in this process, if
    `model` is worth it and the operator gives our bits; whether it does."""
    held = [p for p in model.parameters() if isinstance(p.data, NF4Tensor)]
    on_cpu = [p for p in held if p.device.type == "cpu"]
    ours = nf4_dequantize.dequantizer is nf4_dequantize.dequantize_nf4
    if ours and sum(p.numel() for p in on_cpu) >= LEAST_WEIGHTS:
        operator = _operator()
        if operator is not None and _has_our_bits(operator):
            nf4_dequantize.dequantizer, ours = partial(_dequantize, operator), False
    if not ours:
        few_rows.use_for(model)
    return not ours


def _dequantize(
    operator: Callable[..., Tensor],
    codes: Tensor,
    products: Tensor,
    offset: Tensor,
    cols: int,
    dtype: torch.dtype,
    row_scale: Tensor | None,
) -> Tensor:
    """As `nf4_dequantize.dequantize_nf4`, which computes what the operator does not take."""
    here = type(codes) is Tensor and codes.device.type == "cpu"
    if not here or cols % BLOCK or dtype not in (torch.float32, torch.bfloat16):
        return nf4_dequantize.dequantize_nf4(codes, products, offset, cols, dtype, row_scale)
    absmax = products + offset
    return operator(codes, absmax if row_scale is None else absmax * row_scale.unsqueeze(1), dtype)


def _operator() -> Callable[..., Tensor] | None:
    """A function of codes `[rows, cols / 2]`, absmax `[rows, blocks]`, and the weights' dtype."""
    if find_spec("bitsandbytes") is None:
        return None
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of a missing kernel for products, which are ours
    try:
        import bitsandbytes  # noqa: F401

        operator: Any = torch.ops.bitsandbytes.dequantize_4bit.default
    except Exception:  # it is built for another machine, or has another API
        return None
    finally:
        logger.setLevel(level)

    def dequantize(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
        shape = codes.size(0), 2 * codes.size(1)
        made: Tensor = operator(
            codes.contiguous().view(-1, 1), absmax.flatten(), BLOCK, "nf4", shape, dtype
        )
        return made

    return dequantize


def _has_our_bits(operator: Callable[..., Tensor]) -> bool:
    codes = torch.arange(256).to(torch.uint8).view(8, 32)
    absmax = torch.tensor([0.0, 1e-3, 0.0217, 0.3, 1.0, 3.3, 55.5, 1e4])
    levels = table(NF4_LEVELS, codes)
    pairs = torch.stack([levels[(codes >> 4).int()], levels[(codes & 15).int()]], dim=-1)
    expected = pairs.flatten(1) * absmax.unsqueeze(1)
    try:
        found = [operator(codes, absmax.unsqueeze(1), t) for t in (torch.float32, torch.bfloat16)]
    except Exception:  # the operator does not compute here
        return False
    return all(torch.equal(one, expected.to(one.dtype)) for one in found)
