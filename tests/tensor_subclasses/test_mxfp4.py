"""MXFP4: every value equals transformers' dequantization, quantizing equals torchao's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qfsdp.tensor_subclasses import mxfp4
from qfsdp.tensor_subclasses.mxfp4 import E2M1_LEVELS, MX_BLOCK, MXFP4Tensor
from tests.tiny import needs_compiler

DTYPES = (torch.float32, torch.bfloat16)
KERNELS = ["eager", pytest.param("compiled", marks=[needs_compiler, pytest.mark.long])]


def every_byte_and_scale() -> tuple[Tensor, Tensor]:
    """Blocks `[256, 16, 16]` with all bytes in every row, and scales `[256, 16]`: row s has s."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    return blocks, scales


def from_checkpoint(blocks: Tensor, scales: Tensor) -> MXFP4Tensor:
    """The bytes of gpt-oss' tensors of one expert as a weight."""
    qdata = torch.cat([blocks.flatten(1), scales], dim=1)
    return MXFP4Tensor(qdata, [], scales.size(1) * MX_BLOCK, torch.bfloat16)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def weight_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_all_bytes_with_all_scales_equal_transformers(
    kernels: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if kernels == "eager":
        request.getfixturevalue("eager")
    blocks, scales = every_byte_and_scale()
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()
    ours = from_checkpoint(blocks, scales).dequantize(dtype)
    assert ours.shape == (256, 512)
    assert torch.equal(bits(ours[:255]), bits(theirs[:255].contiguous()))
    assert ours[:253].isfinite().all()  # from 253 on 4 and 6 are too large for fp32
    assert ours[255].isnan().all()  # transformers: 2**128


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("eager")
def test_quantizing_equals_torchao(dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    weight = weight_of(130, 192, dtype=dtype)
    weight[3], weight[4, :32] = 0, 1e-30
    edges = torch.tensor(E2M1_LEVELS[:8])
    ties = torch.cat([(edges[1:] + edges[:-1]) / 2, edges, torch.tensor([5.01, 6.5, 7.9])])
    weight[5] = 0
    weight[5, : ties.numel()], weight[5, 32 : 32 + ties.numel()] = ties, -ties
    ours = MXFP4Tensor.empty(130, 192, dtype, "cpu")
    ours.quantize_(weight)
    scales, codes = to_mx(weight, torch.float4_e2m1fn_x2, MX_BLOCK, ScaleCalculationMode.FLOOR)
    assert torch.equal(ours.qdata[:, :96], codes.view(torch.uint8))
    assert torch.equal(ours.qdata[:, 96:], scales.view(torch.uint8))


@pytest.mark.usefixtures("eager")
def test_what_is_on_the_grid_comes_back_exactly() -> None:
    blocks, scales = every_byte_and_scale()
    first = from_checkpoint(blocks[1:252], scales[1:252]).dequantize(torch.float32)
    again = MXFP4Tensor.empty(*first.shape, torch.float32, "cpu")
    again.quantize_(first)
    assert torch.equal(again.dequantize(), first)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 96, 130])
def test_widths_that_32_does_not_divide(cols: int) -> None:
    weight = weight_of(7, cols)
    ours = MXFP4Tensor.empty(7, cols, torch.float32, "cpu")
    ours.quantize_(weight)
    padded = torch.nn.functional.pad(weight, (0, -cols % MX_BLOCK))
    whole = MXFP4Tensor.empty(*padded.shape, torch.float32, "cpu")
    whole.quantize_(padded)
    assert torch.equal(ours.dequantize(), whole.dequantize()[:, :cols])
    blocks = padded.unflatten(1, (-1, MX_BLOCK))
    bound = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).flatten(1)[:, :cols] / 4
    assert ((ours.dequantize() - weight).abs() <= bound).all()


@pytest.mark.usefixtures("eager")
def test_a_factor_per_row_is_rounded_once() -> None:
    weight = MXFP4Tensor.empty(9, 64, torch.bfloat16, "cpu")
    weight.quantize_(weight_of(9, 64))
    factors = torch.linspace(0.1, 3, 9)
    found = MXFP4Tensor.dequantize_rows(weight.qdata, [], 64, 0, torch.bfloat16, factors)
    exact = weight.dequantize(torch.float32) * factors.unsqueeze(1)
    assert torch.equal(found, exact.bfloat16())


@needs_compiler
@pytest.mark.long
def test_compiled_kernels_give_the_bits_of_uncompiled_ones() -> None:
    blocks = weight_of(257, 192)
    for a, b in zip(
        mxfp4.quantize_blocks(blocks), mxfp4.quantize_blocks.__wrapped__(blocks), strict=True
    ):
        assert torch.equal(a, b)
    codes = mxfp4.quantize_blocks(blocks)[0]
    assert torch.equal(mxfp4.pack(codes), mxfp4.pack.__wrapped__(codes))
