"""NF4's other kernels, which `QFSDP_ONE_KERNEL=1` and `QFSDP_NORM_KERNEL=1` turn on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qfsdp.tensor_subclasses import nf4, nf4_one_kernel
from tests.tiny import needs_compiler

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(64, 576), (40, 577), (3, 64)])
@pytest.mark.usefixtures("eager")
def test_one_kernel_has_the_bits_of_two(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_bits(shape, dtype, monkeypatch)


@pytest.mark.long
@needs_compiler
def test_one_kernel_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits((300, 1024), torch.bfloat16, monkeypatch)


def same_bits(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = nf4.quantize(torch.randn(shape, generator=generator) * 0.02)
    factors = torch.rand(shape[0], generator=generator) + 0.5
    rows = slice(shape[0] // 3, shape[0])
    for weight, factor in ((whole, None), (whole, factors), (whole[rows], factors[rows])):
        arguments = (weight.qdata, weight.metadata, weight.cols, weight.row_offset, dtype, factor)
        monkeypatch.delenv("QFSDP_ONE_KERNEL", raising=False)
        expected = weight.dequantize_rows(*arguments)
        monkeypatch.setenv("QFSDP_ONE_KERNEL", "1")
        found = weight.dequantize_rows(*arguments)
        assert found.dtype == dtype and torch.equal(found.float(), expected.float())


@pytest.mark.usefixtures("eager")
def test_experts_share_the_builds_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build belongs to its numbers and the shapes of its tensors."""
    builds, kernel = set(), nf4_one_kernel._write_at_once

    def noted(*args: object) -> None:
        builds.add(tuple(a.shape if isinstance(a, torch.Tensor) else a for a in args))
        kernel(*args)

    monkeypatch.setattr(nf4_one_kernel, "_write_at_once", noted)
    monkeypatch.setenv("QFSDP_ONE_KERNEL", "1")
    experts, rows = 12, 16
    for cols, expected in ((1024, 1), (256, 4)):  # 256 blocks an expert, as many as a scale; 64
        whole = nf4.quantize(torch.randn(experts * rows, cols) * 0.02)
        dense = whole.dequantize()
        builds.clear()
        for first in range(0, experts * rows, rows):
            expert = whole[first : first + rows]
            assert torch.equal(expert.dequantize(), dense[first : first + rows])
        assert len(builds) == expected


# Triton reads TRITON_INTERPRET when it is imported; then kernels run in NumPy, on a CPU.
INTERPRETED = """
import torch
from qfsdp.modules.adapters import row_norms
from qfsdp.tensor_subclasses import nf4, nf4_norm_kernel

torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
    whole = nf4.quantize(torch.randn(83, 192) * 0.02, dtype)
    for rank in (5, 16, 20):
        a, b = torch.randn(rank, 192), torch.randn(83, rank) * 0.02
        for rows in (slice(0, 83), slice(7, 40)):
            weight = whole[rows]
            exact = weight.dequantize(dtype).float() @ a.to(dtype).float().t()
            found = nf4_norm_kernel.frozen_products(weight, a)
            assert found.shape == exact.shape
            assert (found - exact).abs().max() < tolerance * exact.abs().max(), (dtype, rank, rows)
            squares = row_norms.squared_norms(weight)
            assert row_norms.has_norm_kernel(weight)
            norms = row_norms.adapted_norms(weight, a, b[rows], 0.5, squares)
            dense = weight.dequantize(dtype).float() + 0.5 * b[rows] @ a.to(dtype).float()
            assert torch.allclose(norms, dense.norm(dim=1), rtol=tolerance + 1e-5)
print("equal")
"""
COMPILED = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qfsdp.tensor_subclasses import nf4_norm_kernel

kernel = nf4_norm_kernel._products
kinds = ["*u8", *["*fp32"] * 6, *["i32"] * 4]
signature = dict(zip(kernel.arg_names, kinds + ["constexpr"] * 7, strict=True))
for capability, rank, rows, shared in ((90, 16, 8192, 227), (89, 128, 14336, 99)):
    values = dict(COLS=4096, ROWS=nf4_norm_kernel.rows_of_program(rows, rank), RANK=rank, HALF=32)
    values |= dict(SCALE_BLOCK=256, DTYPE=tl.bfloat16, FACTOR=tl.bfloat16)
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "mma" in built.asm["ptx"] and len(built.asm["cubin"]) > 1000
    assert built.metadata.shared <= shared * 1024, (capability, built.metadata.shared)
print("built")
"""


@pytest.mark.parametrize("code", [INTERPRETED, COMPILED], ids=["interpreted", "for_gpus"])
def test_the_norm_kernel(code: str) -> None:
    """Without a GPU: its numbers, by Triton's interpreter, and its code for an H100 and a 4090."""
    pytest.importorskip("triton")
    environment = os.environ | {"QFSDP_NORM_KERNEL": "1", "QFSDP_EAGER_KERNELS": "1"}
    if code is INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("equal", "built")


@pytest.mark.usefixtures("eager")
def test_the_switch_changes_nothing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from qfsdp.modules.adapters.row_norms import has_norm_kernel

    monkeypatch.setenv("QFSDP_NORM_KERNEL", "1")
    assert not has_norm_kernel(nf4.quantize(torch.randn(8, 64)))
