"""NF4's kernel for GPUs: here it runs on a CPU."""

from __future__ import annotations

import pytest
import torch

from qfsdp.tensor_subclasses import nf4, nf4_dequantize
from qfsdp.tensor_subclasses.nf4_dequantize import dequantize_at_once
from tests.tiny import needs_compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(64, 576), (40, 577), (3, 64)])
@pytest.mark.usefixtures("eager")
def test_one_kernel_has_the_bits_of_two(shape: tuple[int, int], dtype: torch.dtype) -> None:
    same_bits(shape, dtype)


@pytest.mark.long
@needs_compiler
def test_one_kernel_compiled() -> None:
    same_bits((300, 1024), torch.bfloat16)


def same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = nf4.quantize(torch.randn(shape, generator=generator) * 0.02)
    factors = torch.rand(shape[0], generator=generator) + 0.5
    rows = slice(shape[0] // 3, shape[0])
    for weight, factor in ((whole, None), (whole, factors), (whole[rows], factors[rows])):
        arguments = (weight.qdata, weight.metadata, weight.cols, weight.row_offset, dtype, factor)
        expected = weight.dequantize_rows(*arguments)
        found = dequantize_at_once(*arguments)
        assert found.dtype == dtype and torch.equal(found.float(), expected.float())


@pytest.mark.usefixtures("eager")
def test_experts_share_the_builds_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build belongs to its numbers and the shapes of its tensors."""
    builds, kernel = set(), nf4_dequantize.write_at_once

    def noted(*args: object) -> None:
        builds.add(tuple(a.shape if isinstance(a, torch.Tensor) else a for a in args))
        kernel(*args)

    monkeypatch.setattr(nf4_dequantize, "write_at_once", noted)
    experts, rows = 12, 16
    for cols, expected in ((1024, 1), (256, 4)):  # 256 blocks an expert, as many as a scale; 64
        whole = nf4.quantize(torch.randn(experts * rows, cols) * 0.02)
        dense = whole.dequantize()
        builds.clear()
        for first in range(0, experts * rows, rows):
            expert = whole[first : first + rows]
            arguments = (expert.qdata, expert.metadata, cols, expert.row_offset, expert.dtype, None)
            assert torch.equal(dequantize_at_once(*arguments), dense[first : first + rows])
        assert len(builds) == expected
