"""The numbers that NF4's codes stand for (`nf4`), and how compiled code finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.kernels.compiled import on_cpu
from qfsdp.tensor_subclasses.kernels.pairs import write_pairs

SCALE_BLOCK = 256  # absmax values per second-level scale

# The 16 levels, published by the authors of QLoRA (appendix E); exact in fp32.
# fmt: off
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
NF4_PAIRS = tuple(level for high in NF4_LEVELS for low in NF4_LEVELS for level in (high, low))
"""The two levels of each byte, one after the other."""


def _dynamic_levels() -> list[float]:
    """The 256 levels of the signed dynamic 8-bit type (https://arxiv.org/abs/1511.04561):
    2**e fractions per decade 10**(e - 6) for e = 0..6, both signs, and 0 and 1."""
    levels = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1.0, 2**e + 1, dtype=torch.float32)
        centres = (10.0 ** (e - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        levels += centres.tolist() + (-centres).tolist()
    return sorted(levels)


DYNAMIC_LEVELS = tuple(_dynamic_levels())


# ---- in compiled code ----------------------------------------------------------------------------


def write_compiled(codes: Tensor, absmax: Tensor, levels: Tensor, out: Tensor) -> None:
    """Writes level * absmax of every code, two weights in each integer of `out`.

    Args:
        codes: uint8 `[rows, cols/2]`.
        absmax: fp32 `[rows, blocks, 1]`.
        levels: `NF4_LEVELS`, fp32.
    """
    code = codes.unflatten(1, (absmax.size(1), BLOCK // 2)).int()
    # Selections of fp16 and fp8 do not vectorize: 0.07 G weights/s, 0.9 with the table.
    selects = on_cpu(code) and out.dtype in (torch.int32, torch.int64)
    level = _selected_level if selects else levels.__getitem__
    write_pairs(level(code >> 4) * absmax, level(code & 15) * absmax, out)


def _selected_level(code: Tensor) -> Tensor:
    """The fp32 level of each code (int32) by 15 selections, which vectorize; a lookup does not, and
    no operation of PyTorch becomes the permute by which bitsandbytes is 2.4 times as fast.

    One core with AVX-512 (Zen 5): 2.07 G weights/s to bf16, 0.63 with a table of 16. With AVX2
    (Zen 3) both run at 0.8.
    """
    chosen = [torch.full((), level, dtype=torch.float32) for level in NF4_LEVELS]
    for bit in (1, 2, 4, 8):
        is_set = (code & bit) != 0
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        chosen = [torch.where(is_set, one, zero) for zero, one in pairs]
    return chosen[0]
