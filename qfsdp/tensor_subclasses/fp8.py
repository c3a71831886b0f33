"""Products of 8-bit floating-point numbers: a frozen weight by the tokens of a layer.

`e4m3` (https://arxiv.org/abs/2209.05433) has 4 bits of exponent and 3 of mantissa, and reaches from
2^-9 to 448. Each row is divided by a scale, its largest magnitude / 448, so that it fills that
range. The product's epilogue multiplies by the scales:

    x[t] ~ token_scale[t] * x8[t]        W[o] ~ row_scale[o] * w8[o]
    y[t, o]  = token_scale[t] * row_scale[o] * sum over i of x8[t, i] * w8[o, i]
    dx[t, i] = token_scale[t] * sum over o of g8[t, o] * w8[o, i]      g = dy * row_scale

Row scales lie along the sum of dx, so they multiply the gradient before it is rounded. DoRA's ratio
and a row scale are one factor.

Rows come from the bytes of NF4 by the kernel that writes bf16 weights otherwise: absmax / row scale
takes the place of absmax. Two roundings to 4 significant bits give y an error of 3.5 % rms; in bf16
it is 0.24 %. GPUs from compute capability 8.9 multiply e4m3 twice as fast as bf16. Elsewhere the
same numbers are multiplied in fp32 (`product`), to try and test it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import table
from qfsdp.tensor_subclasses.frozen_weight import frozen_weight
from qfsdp.tensor_subclasses.kernels.compiled import compiled, on_cpu
from qfsdp.tensor_subclasses.nf4_dequantize import absmax_of_blocks
from qfsdp.tensor_subclasses.nf4_levels import DYNAMIC_LEVELS
from qfsdp.tensor_subclasses.quantized_tensor import numbers_of

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
TILE = 16  # GPUs need sizes that it divides


@compiled
def to_fp8(rows: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """`rows * factor` as e4m3, each row with its scale.

    Args:
        rows: `[n, cols]`, floating point.
        factor: fp32 `[cols]`, or None: ones.

    Returns:
        e4m3 `[n, cols]` and fp32 `[n, 1]`. A row with NaN or infinity becomes NaN.
    """
    numbers = rows.float()
    if factor is not None:
        numbers = numbers * factor
    scale = numbers.abs().amax(1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (numbers / scale).to(E4M3), scale


def frozen_weight_fp8(
    qdata: Tensor, metadata: Sequence[Tensor], format: str, cols: int, row_offset: int
) -> tuple[Tensor, Tensor]:
    """Rows of a quantized weight as e4m3 `[rows, cols]`, and their scales, fp32 `[rows]`.

    Args: as of `QuantizedTensor.dequantize_rows`; `format` is one of NF4, with or without
            metadata.
    """
    absmax = qdata[:, -(-cols // 2) :]
    if metadata:
        scales, offset = metadata
        dynamic = table(DYNAMIC_LEVELS, qdata)
        first = row_offset * absmax.size(1)
        scale, inverse = _decoded_scales(absmax, scales, offset, dynamic, first)
    else:
        scale, inverse = _row_scales(numbers_of(absmax, torch.float32))
    return frozen_weight(qdata, metadata, format, cols, row_offset, E4M3, inverse), scale


@partial(compiled, smallest=1 << 8)
def _decoded_scales(
    absmax_codes: Tensor, scales: Tensor, offset: Tensor, dynamic: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """`_row_scales` of quantized absmax, in one kernel."""
    return _row_scales((absmax_of_blocks(absmax_codes, scales, dynamic, first) + offset).abs())


def _row_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each row, fp32 `[rows]`, and its inverse."""
    scale = absmax.amax(1).clamp(min=1e-30) / LARGEST
    return scale, scale.reciprocal()


def transposed(weight: Tensor) -> Tensor:
    """e4m3 `[rows, cols]` -> `[cols, rows]`, adjacent in memory."""
    if on_cpu(weight):
        return weight.t().contiguous()
    return _transposed(weight.view(torch.uint8)).view(E4M3)


@partial(compiled, static_on_gpus=True)
def _transposed(numbers: Tensor) -> Tensor:
    """Compiled, it reads and writes tiles."""
    return numbers.t().contiguous()


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`(a_scale * a) @ (b_scale * b).T`, added up in fp32 and rounded once, to `dtype`.

    Args:
        a: e4m3 `[n, k]`; a_scale: fp32 `[n, 1]`.
        b: e4m3 `[m, k]`; b_scale: fp32 `[m]`.
        dtype: a GPU multiplies for bf16 only.

    Returns:
        `[n, m]`.
    """
    if on_cpu(a):
        return (a.float() @ b.float().t()).mul_(a_scale).mul_(b_scale).to(dtype)
    if missing := -a.size(0) % TILE:  # tokens of a batch, in generation or the last rows
        a = torch.cat([a, a.new_zeros(missing, a.size(1))])
        a_scale = torch.cat([a_scale, a_scale.new_ones(missing, 1)])
    y: Tensor = torch._scaled_mm(a, b.t(), a_scale, b_scale.unsqueeze(0), out_dtype=dtype)
    return y[: y.size(0) - missing]


def forward_product(
    x: Tensor,
    qdata: Tensor,
    metadata: Sequence[Tensor],
    format: str,
    row_offset: int,
    ratio: Tensor | None,
) -> Tensor:
    """`ratio * (x @ W.T)` of x's dtype, `[tokens, rows]`; x: `[tokens, cols]`."""
    weight, scale = frozen_weight_fp8(qdata, metadata, format, x.size(1), row_offset)
    x8, x_scale = to_fp8(x, None)
    return product(x8, weight, x_scale, scale if ratio is None else scale * ratio, x.dtype)


def backward_product(
    grad: Tensor,
    qdata: Tensor,
    metadata: Sequence[Tensor],
    format: str,
    cols: int,
    row_offset: int,
    ratio: Tensor | None,
) -> Tensor:
    """`(grad * ratio) @ W` of grad's dtype, `[tokens, cols]`; grad: `[tokens, rows]`."""
    weight, scale = frozen_weight_fp8(qdata, metadata, format, cols, row_offset)
    g8, g_scale = to_fp8(grad, scale if ratio is None else scale * ratio)
    ones = torch.ones(cols, dtype=torch.float32, device=grad.device)
    # GPUs take both operands with the summed dimension last.
    return product(g8, transposed(weight), g_scale, ones, grad.dtype)
