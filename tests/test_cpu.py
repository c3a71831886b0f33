"""What is said where the CPU computes in a dtype that it has no products for."""

from __future__ import annotations

import logging

import pytest
import torch

from qfsdp import cpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("has_products", "dtype", "device", "told"),
    [
        (False, torch.bfloat16, CPU, True),
        (False, torch.float32, CPU, False),
        (False, torch.bfloat16, GPU, False),
        (True, torch.bfloat16, CPU, False),
    ],
)
def test_bf16_without_products(
    has_products: bool,
    dtype: torch.dtype,
    device: torch.device,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cpu, "has_bf16_products", lambda: has_products)
    with caplog.at_level(logging.WARNING, logger="qfsdp"):
        cpu.warn_of_bf16(dtype, device)
    assert [("model.dtype=fp32" in r.getMessage()) for r in caplog.records] == [True] * told
