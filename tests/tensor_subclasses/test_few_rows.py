"""Products of few rows by bitsandbytes' operator: near those of our weights, only in answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.folded import FoldedLinear
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.tensor_subclasses import few_rows, nf4

pytestmark = pytest.mark.usefixtures("eager")


def base(rows: int = 96, cols: int = 192) -> QuantizedLinear:
    torch.manual_seed(0)
    return QuantizedLinear(nf4.quantize(torch.randn(rows, cols), torch.bfloat16), None)


def used_for(model: nn.Module) -> bool:
    pytest.importorskip("bitsandbytes")
    few_rows.use_for(model)
    return any(hasattr(p, "codes_in_order") for p in model.parameters())


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 0.01 * expected.abs().max())


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5)])
@pytest.mark.parametrize("method", [None, "lora", "dora"])
@torch.no_grad()
def test_few_rows(method: str | None, shape: tuple[int, int]) -> None:
    linear: nn.Module = base()
    if method is not None:
        adapted = LowRankLinear(base(), AdapterConfig(method, rank=4, alpha=8))  # type: ignore[arg-type]
        init_adapters(adapted, seed=0)
        nn.init.normal_(adapted.lora_B, std=0.05)
        if method == "dora":
            adapted.magnitude.mul_(1.5)
        linear = FoldedLinear(adapted)
    if not used_for(linear):
        pytest.skip("bitsandbytes has no such operator for this CPU")
    x = torch.randn(*shape, 192, dtype=torch.bfloat16)
    expected = linear(x)
    with few_rows.generating():
        found = linear(x)
        assert found.dtype == x.dtype and found.shape == expected.shape
        assert near(found, expected)
        assert not torch.equal(found, expected)  # else the operator did not compute it
    assert torch.equal(linear(x), expected)


@torch.no_grad()
def test_what_keeps_our_kernel() -> None:
    linear = base()
    if not used_for(linear):
        pytest.skip("bitsandbytes has no such operator for this CPU")
    many = torch.randn(few_rows.MOST_ROWS + 1, 192, dtype=torch.bfloat16)
    with few_rows.generating():
        assert few_rows.product(many, linear.weight) is None
        assert few_rows.product(many[:1].float(), linear.weight) is None
        assert few_rows.product(many[:1], linear.weight) is not None
        assert few_rows.product(many[:1], base().weight) is None  # nobody asked
    assert few_rows.product(many[:1], linear.weight) is None
    assert not used_for(base(rows=95)) and not used_for(base(cols=100))


def test_an_operator_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, codes: Tensor, *_: object) -> Tensor:
        return torch.ones(*x.shape[:-1], codes.size(0), dtype=x.dtype)

    def fails(*_: object) -> Tensor:
        raise RuntimeError("not for this CPU")

    for one in (wrong, fails):
        monkeypatch.setattr(few_rows, "_multiply", one)
        assert not used_for(base())
