"""NF4 equals bitsandbytes bit for bit; also row shards and odd columns, which it does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes import functional as bnb
from torch import Tensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.tensor_subclasses import four_bit, nf4, nf4_quantize
from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.nf4 import NF4Tensor
from qfsdp.tensor_subclasses.nf4_fp32_absmax import NF4Fp32AbsmaxTensor
from qfsdp.tensor_subclasses.nf4_levels import DYNAMIC_LEVELS, NF4_LEVELS
from qfsdp.tensor_subclasses.nf4_quantize import nearest_levels
from tests.tiny import needs_compiler

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT = {"codes": 0, "absmax codes": 0, "scales": 0, "offset": 0, "dequantized": 0}


def random_weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def differing_bytes(a: Tensor, b: Tensor) -> int:
    a, b = a.flatten(), b.flatten()
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return int((a.view(torch.uint8) != b.view(torch.uint8)).sum())


def mismatches(weight: Tensor) -> dict[str, int]:
    """Number of bytes that differ between our NF4 of `weight` and bitsandbytes', by part."""
    ours = nf4.quantize(weight)
    theirs, state = bnb.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    code_bytes = weight.size(1) // 2
    return {
        "codes": differing_bytes(ours.qdata[:, :code_bytes], theirs),
        "absmax codes": differing_bytes(ours.qdata[:, code_bytes:], state.absmax),
        "scales": differing_bytes(ours.scales, state.state2.absmax),
        "offset": differing_bytes(ours.offset, state.offset),
        "dequantized": differing_bytes(ours.dequantize(), bnb.dequantize_4bit(theirs, state)),
    }


SHAPES = [
    (1, 64),
    (3, 64),
    (7, 128),
    (5, 192),
    (255, 64),  # 255, 256, 257 blocks: around one second-level block
    (256, 64),
    (257, 64),
    (192, 576),
    (577, 576),
    (1536, 576),
    (65, 4096),
    (512, 28672),
]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_equal_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert mismatches(random_weight(*shape, dtype=dtype)) == EXACT


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_experts_equal_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Experts are rows of one weight. Codes and fp32 absmax are those of each expert by itself; the
    second level is that of all rows together: here a block of 256 absmax ends within an expert."""
    experts, out, cols = 5, 36, 192
    stack = random_weight(experts * out, cols, dtype=dtype)
    assert mismatches(stack) == EXACT
    plain = NF4Fp32AbsmaxTensor.empty(*stack.shape, dtype, "cpu")
    plain.quantize_(stack)
    doubly = nf4.quantize(stack).qdata[:, : cols // 2]
    for expert, weight in enumerate(stack.split(out)):
        codes, state = bnb.quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
        )
        mine = plain.qdata[expert * out : (expert + 1) * out]
        assert differing_bytes(mine[:, : cols // 2], codes) == 0
        assert differing_bytes(doubly[expert * out : (expert + 1) * out], codes) == 0
        absmax = mine[:, cols // 2 :].contiguous().view(torch.float32)
        assert differing_bytes(absmax, state.absmax) == 0


def with_zero_rows_and_blocks() -> Tensor:
    weight = random_weight(300, 256)
    weight[5] = 0
    weight[10:20, 64:128] = 0
    return weight


def on_the_edges_between_codes() -> Tensor:
    """All levels, and all midpoints of two levels with both fp32 neighbours, scaled by row."""
    levels = torch.tensor(NF4_LEVELS)
    midpoints = (levels[1:] + levels[:-1]) / 2
    up, down = (torch.nextafter(midpoints, torch.tensor(end)) for end in (2.0, -2.0))
    row = torch.cat([levels, midpoints, up, down, torch.zeros(3)])
    return row * random_weight(100, 1).abs()


UNUSUAL = {
    "zero rows and blocks": with_zero_rows_and_blocks(),
    "all zero": torch.zeros(10, 128),
    "one constant": torch.full((100, 128), 0.37),
    "a constant per block": random_weight(64, 4).repeat_interleave(BLOCK, 1),
    "one number per block": F.pad(random_weight(64, 1), (0, BLOCK - 1)),
    "rows from 1e-36 to 1e30": random_weight(300, 256) * torch.logspace(-34, 32, 300)[:, None],
    "all near 1e-37": random_weight(64, 128) * 1e-35,
    "all near 1e34": random_weight(64, 128) * 1e36,
    "edges between codes": on_the_edges_between_codes(),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)  # fp16 does not hold them
@pytest.mark.parametrize("name", UNUSUAL)
def test_bits_of_unusual_numbers(name: str, dtype: torch.dtype) -> None:
    assert mismatches(UNUSUAL[name].to(dtype)) == EXACT


def test_bits_of_every_linear_of_a_real_model(smollm2_dir: Path) -> None:
    source = ModelWeights(smollm2_dir).files
    names = [name for name in source.tensors if name.endswith("_proj.weight")]
    assert len(names) == 7 * 30
    weights = 0
    for name in names:
        weight = source.read(source.tensors[name])
        assert mismatches(weight) == EXACT, name
        weights += weight.numel()
    assert weights == 106_168_320
    print(f"SmolLM2-135M: {len(names)} linears, {weights:,} weights, 0 mismatches")


def test_levels_of_the_scales_equal_those_of_bitsandbytes() -> None:
    assert torch.equal(torch.tensor(DYNAMIC_LEVELS), bnb.create_dynamic_map())


@pytest.mark.usefixtures("eager")
def test_of_two_equally_near_levels_gpus_take_the_even_code() -> None:
    """As bitsandbytes' kernel for GPUs: its binary search ends at an even code."""
    levels = torch.tensor(DYNAMIC_LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    of_gpus, of_cpus = (nearest_levels(middles, even).int() for even in (True, False))
    assert torch.equal(of_cpus, torch.arange(255, dtype=torch.int32))
    assert torch.equal(of_gpus, of_cpus + of_cpus % 2)
    for near in (torch.nextafter(middles, levels[:-1]), torch.nextafter(middles, levels[1:])):
        assert torch.equal(nearest_levels(near, True), nearest_levels(near))


def test_bits_per_weight() -> None:
    weight = nf4.quantize(random_weight(4096, 4096, dtype=torch.bfloat16))
    held = weight.qdata.nbytes + weight.scales.nbytes + weight.offset.nbytes
    assert round(8 * held / weight.numel(), 3) == 4.127


# ---- compiled kernels --------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(577, 576), (65, 577)], ids=str)
def test_compiled_kernels_give_the_bits_of_the_plain_functions(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(*shape, dtype=dtype)
    blocks = F.pad(weight, (0, -shape[1] % BLOCK))
    kernel = nf4_quantize.quantize_blocks
    for compiled, plain in zip(kernel(blocks), kernel.__wrapped__(blocks), strict=True):
        assert differing_bytes(compiled, plain) == 0
    whole = nf4.quantize(weight)
    scale = torch.rand(shape[0]) - 0.5
    # In parts, but large enough to be compiled.
    monkeypatch.setattr(four_bit, "KERNEL_CHUNK", min(100, shape[0] // 3) * shape[1])
    for offset, row_scale in ((0, None), (7, None), (7, scale[7:])):
        args = (whole.qdata[offset:], whole.metadata, shape[1], offset, dtype, row_scale)
        with monkeypatch.context() as plainly:
            compiled = nf4.NF4Tensor.dequantize_rows(*args)
            plainly.setattr("qfsdp.tensor_subclasses.kernels.compiled.can_compile", lambda: False)
            plain = nf4.NF4Tensor.dequantize_rows(*args)
        assert differing_bytes(compiled, plain) == 0


@pytest.mark.long
@needs_compiler
def test_one_build_per_shape_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than Dynamo's limit of builds for a function: none runs uncompiled."""
    monkeypatch.setattr("qfsdp.tensor_subclasses.kernels.dispatch.DYNAMIC_DEVICES", ())
    weights = [nf4.quantize(random_weight(rows, 576)) for rows in range(64, 68)]
    with torch._dynamo.config.patch(recompile_limit=2):
        found = [weight.dequantize(torch.bfloat16) for weight in weights]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for weight, static in zip(weights, found, strict=True):
        assert torch.equal(weight.dequantize(torch.bfloat16), static)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    monkeypatch.undo()
    for weight, static in zip(weights, found, strict=True):
        assert torch.equal(weight.dequantize(torch.bfloat16), static)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("format", [NF4Tensor, NF4Fp32AbsmaxTensor])
@pytest.mark.parametrize("cols", [128, 130])
def test_rows_can_be_scaled(format: Any, cols: int) -> None:
    weight, scale = format.empty(33, cols, torch.bfloat16, "cpu"), torch.rand(33) + 0.5
    weight.quantize_(random_weight(33, cols, dtype=torch.float32))
    args = (weight.qdata, weight.metadata, cols, 0, torch.bfloat16)
    scaled = format.dequantize_rows(*args, scale)
    expected = weight.dequantize(torch.float32) * scale.unsqueeze(1)
    torch.testing.assert_close(scaled.float(), expected, rtol=2**-8, atol=0)
    ones = format.dequantize_rows(*args, torch.ones(33))
    assert torch.equal(ones, weight.dequantize())


def test_kernels_work_beyond_dynamos_limit_of_builds() -> None:
    """Dtypes, odd columns, single rows, slices and grad mode may each need another build. Beyond
    Dynamo's limit a process must go on, not raise."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for dtype in DTYPES:
            weight = nf4.quantize(random_weight(65, 192, dtype=dtype))
            torch.testing.assert_close(
                weight.dequantize(), random_weight(65, 192, dtype=dtype), rtol=0, atol=0.02
            )


# ---- columns that 64 does not divide -----------------------------------------------------------

# Half the widest gap between two levels. The error of absmax is half the widest gap of the dynamic
# levels (0.9 / 64), in units of the second-level scale; bitsandbytes' table lookup and rounding to
# fp32 add a little to it.
CODE_ERROR = (1.0 - 0.6961928009986877) / 2
ABSMAX_ERROR = 0.9 / 64 / 2 * 1.02


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [1, 2, 63, 65, 127, 577])
def test_odd_columns_equal_those_of_the_zero_padded_row(cols: int, dtype: torch.dtype) -> None:
    weight = random_weight(33, cols, dtype=dtype)
    padded = nf4.quantize(F.pad(weight, (0, -cols % BLOCK)))
    odd = nf4.quantize(weight)
    codes, padded_codes = -(-cols // 2), padded.cols // 2
    assert odd.qdata.shape == (33, codes + -(-cols // BLOCK))
    assert torch.equal(odd.qdata[:, :codes], padded.qdata[:, :codes])
    assert torch.equal(odd.qdata[:, codes:], padded.qdata[:, padded_codes:])
    assert torch.equal(odd.scales, padded.scales)
    assert torch.equal(odd.offset, padded.offset)
    assert differing_bytes(odd.dequantize(), padded.dequantize()[:, :cols].contiguous()) == 0

    blocks = F.pad(weight.float(), (0, -cols % BLOCK)).unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1, keepdim=True)
    bound = CODE_ERROR * absmax + ABSMAX_ERROR * odd.scales.max()
    error = (odd.dequantize(torch.float32) - weight.float()).abs()
    assert (error <= bound.expand_as(blocks).flatten(1)[:, :cols]).all()


# ---- weights that cannot be quantized ----------------------------------------------------------


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_named(value: float) -> None:
    weight = random_weight(9, 65)
    weight[5, 64] = weight[7, 0] = value
    whole = NF4Tensor.empty(9, 65, torch.float32, "cpu")
    message = r"^q_proj: row 5 holds NaN or infinity; it cannot be quantized$"
    with pytest.raises(ValueError, match=message):
        whole.quantize_(weight, "q_proj")
    # A shard names the row of the whole weight; a shard without that row raises too.
    absmax = nf4_quantize.quantize_rows(weight)[1]
    for rows in (slice(4, 9), slice(0, 2)):
        with pytest.raises(ValueError, match=message):
            whole[rows].quantize_(weight[rows], "q_proj", gather_rows=lambda _: absmax)


@pytest.mark.usefixtures("eager")
def test_finite_weights_whose_mean_overflows_are_refused_too() -> None:
    """The mean absmax of weights near the end of fp32 is infinite: all weights would be NaN."""
    with pytest.raises(ValueError, match="^weight: "):
        nf4.quantize(torch.full((64, 128), 3e38))


# ---- row shards --------------------------------------------------------------------------------

SPLITS = [[577], [1] * 577, [193, 193, 191], [145, 145, 145, 142], [1, 7, 13, 0, 300, 256]]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("cols", [576, 130])
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{len(split)} parts")
def test_row_shards_are_rows_of_the_whole(split: list[int], cols: int) -> None:
    weight = random_weight(577, cols)
    whole = nf4.quantize(weight)
    values = whole.dequantize()
    _, absmax = nf4_quantize.quantize_rows(weight)
    target = NF4Tensor.empty(577, cols, torch.float32, "cpu")
    target.qdata.fill_(255)
    start = 0
    for rows in split:
        part = slice(start, start + rows)
        shard = target[part]  # a view: it writes into the rows of `target`
        assert shard.row_offset == start
        shard.quantize_(weight[part], gather_rows=lambda mine: absmax)
        assert torch.equal(shard.dequantize(), values[part])
        start += rows
    assert torch.equal(target.qdata, whole.qdata)
    assert torch.equal(target.scales, whole.scales)
    assert torch.equal(target.offset, whole.offset)
