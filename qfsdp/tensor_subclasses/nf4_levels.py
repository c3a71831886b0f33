"""The numbers that NF4's codes stand for (`nf4`), and how compiled code finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.kernels.compiled import on_cpu
from qfsdp.tensor_subclasses.kernels.pairs import twice_in_bf16, write_pairs

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
        out: `[rows, cols/2]`; to bf16 on CPUs `[rows, blocks, 32]`.
    """
    code = codes.unflatten(1, (absmax.size(1), BLOCK // 2)).int()
    if out.dim() == 3:
        out.copy_(_selected_products(code, twice_in_bf16(absmax * levels)))
        return
    # Selections of fp16 and fp8 do not vectorize: 0.07 G weights/s, 0.9 with the table.
    selects = on_cpu(code) and out.dtype == torch.int64
    level = _selected_level if selects else levels.__getitem__
    write_pairs(level(code >> 4) * absmax, level(code & 15) * absmax, out)


def _selected_products(code: Tensor, products: Tensor) -> Tensor:
    """Both weights of a byte, as the two halves of an int32, by 15 selections. There is a mask for
    each of the four bits of a code. If a weight's code has the bit, its half of the mask is 16
    ones. Selections vectorize, lookups do not. No operation of PyTorch becomes bitsandbytes'
    permute.

    1536 x 576 on a Zen 4: 0.28 ms; 0.47 by selecting fp32 levels (`_selected_level`), 0.16 by
    bitsandbytes. With `zero ^ ((zero ^ one) & mask)`, one operation less, 0.38.

    Args:
        code: int32 `[rows, blocks, 32]`, the bytes of codes.
        products: int32 `[rows, blocks, 16]`, what each code stands for in a block, as bf16 in both
            halves.
    """
    # Inductor stores what `as_strided` is called on; else it computes all 16 for every register.
    products = products.as_strided(products.shape, products.stride())
    chosen = products.split(1, dim=2)
    both = (code >> 4) | (code << 16)
    for bit in range(4):
        is_set = (both >> bit) & 0x00010001
        mask = (is_set << 16) - is_set
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        chosen = tuple((one & mask) | (zero & ~mask) for zero, one in pairs)
    return chosen[0]


def _selected_level(code: Tensor) -> Tensor:
    """The fp32 level of each code (int32) by 15 selections. One core with AVX-512 (Zen 5), to bf16:
    2.07 G weights/s, 0.63 with a table of 16. With AVX2 (Zen 3) both run at 0.8."""
    chosen = [torch.full((), level, dtype=torch.float32) for level in NF4_LEVELS]
    for bit in (1, 2, 4, 8):
        is_set = (code & bit) != 0
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        chosen = [torch.where(is_set, one, zero) for zero, one in pairs]
    return chosen[0]
