"""bitsandbytes' operator for CPUs in models that answer: our bits, or not used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfsdp.tensor_subclasses import nf4, nf4_by_bitsandbytes, nf4_dequantize
from qfsdp.tensor_subclasses.nf4_by_bitsandbytes import use_for

pytestmark = pytest.mark.usefixtures("eager")


class Model(nn.Module):
    def __init__(self, cols: int = 192) -> None:
        super().__init__()
        weight = nf4.quantize(torch.randn(83, cols))
        self.weight = nn.Parameter(weight, requires_grad=False)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4_dequantize, "dequantizer", nf4_dequantize.dequantize_nf4)
    monkeypatch.setattr(nf4_by_bitsandbytes, "LEAST_WEIGHTS", 83 * 192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    model, calls = Model(), []
    of_all, of_some = model.weight.data, model.weight.data[7:40]  # type: ignore[index]
    scale = torch.rand(33) + 0.5

    def weights() -> list[Tensor]:
        which = (of_some.qdata, of_some.metadata, 192, of_some.row_offset, dtype, scale)
        return [of_all.dequantize(dtype), nf4.NF4Tensor.dequantize_rows(*which)]

    expected = weights()
    assert use_for(model)
    kernel = nf4_dequantize.dequantize_nf4

    def noted(*given: Any) -> Tensor:
        calls.append(1)
        return kernel(*given)

    monkeypatch.setattr(nf4_dequantize, "dequantize_nf4", noted)
    for one, other in zip(weights(), expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert not calls
    odd = Model(100).weight.data  # its last blocks are shorter
    assert odd.dequantize(dtype).shape == (83, 100) and len(calls) == 1  # type: ignore[operator]


def test_small_models_and_other_bits_keep_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4_by_bitsandbytes, "_operator", lambda: pytest.fail("imported"))
    assert not use_for(Model(128))

    def rounds(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(codes), 2 * codes.size(1), dtype=dtype)

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("not implemented for this CPU")

    for operator in (None, rounds, fails):
        monkeypatch.setattr(nf4_by_bitsandbytes, "_operator", lambda operator=operator: operator)
        assert not use_for(Model()) and nf4_dequantize.dequantizer is nf4_dequantize.dequantize_nf4


def test_its_import_prints_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warns = "import logging\nlogging.getLogger('bitsandbytes.ops').warning('no kernel')\n"
    (tmp_path / "bitsandbytes.py").write_text(warns)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    use_for(Model())
    assert sys.modules.pop("bitsandbytes").__file__ == str(tmp_path / "bitsandbytes.py")
    assert not caplog.records
