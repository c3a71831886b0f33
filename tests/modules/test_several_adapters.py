"""A linear with several adapters: the numbers of one linear each, and the base read once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from qfsdp.common.errors import UserError
from qfsdp.modules.activations import checkpointed
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.several import AdapterRows, SeveralLinear, named
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.tensor_subclasses.nf4 import NF4Tensor
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS

CONFIGS = {
    "small": AdapterConfig("lora", rank=2, alpha=3),
    "dora": AdapterConfig("dora", rank=5, alpha=7),
    "absent": AdapterConfig("lora"),
    "late": AdapterConfig("lora", rank=3, alpha=1),
}
COUNTS = (2, 3, 1, 0)


def base(format: str, dtype: torch.dtype) -> QuantizedLinear:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 64, dtype=dtype), torch.randn(48, dtype=dtype)
    if not format:
        return QuantizedLinear(weight, bias)
    quantized = FORMATS[format].empty(48, 64, dtype, torch.device("cpu"))
    quantized.quantize_([weight], "w", lambda rows: rows)
    return QuantizedLinear(quantized, bias)


def several(of: QuantizedLinear) -> SeveralLinear:
    here = {name: config for name, config in CONFIGS.items() if name != "absent"}
    linear = SeveralLinear(of, here, AdapterRows(list(CONFIGS), COUNTS))
    for name in here:
        part = linear.part(name)
        assert part is not None
        nn.init.normal_(part.lora_A), nn.init.normal_(part.lora_B)
        if part.magnitude is not None and part.weight_norm is not None:
            nn.init.uniform_(part.magnitude, 1, 2), nn.init.uniform_(part.weight_norm, 1, 2)
    return linear


@pytest.mark.parametrize("format", ["nf4", "hqq", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_has_the_numbers_of_a_linear_of_its_own(format: str, dtype: torch.dtype) -> None:
    of = base(format, dtype)
    linear = several(of)
    x = torch.randn(6, 7, 64, dtype=dtype, requires_grad=True)
    y, grad = linear(x), torch.randn(6, 7, 48, dtype=dtype)
    (of_x,) = torch.autograd.grad(y, [x], grad, retain_graph=True)
    y.backward(grad)

    def check(found: Tensor | None, expected: Tensor) -> None:
        assert found is not None
        off = (found.float() - expected.float()).norm() / expected.float().norm()
        assert off < (1e-6 if dtype == torch.float32 else 0.01)

    for (name, config), part, count in zip(CONFIGS.items(), slices(COUNTS), COUNTS, strict=True):
        mine, alone = linear.part(name), LowRankLinear(of, config)
        trained = (
            {} if mine is None else {n: p for n, p in mine.named_parameters() if p.grad is not None}
        )
        if count == 0:
            assert len(trained) == 2 and not any(p.grad.any() for p in trained.values())
            continue
        if mine is not None:
            alone.load_state_dict(mine.state_dict() | of.state_dict(), assign=True)
        for param in trained:
            alone.get_parameter(param).requires_grad_()
        own = x.detach()[part].requires_grad_()
        expected = of(own) if mine is None else alone(own)
        tensors = [own, *map(alone.get_parameter, trained)]
        of_own, *grads = torch.autograd.grad(expected, tensors, grad[part])
        check(y[part], expected)
        check(of_x[part], of_own)
        assert len(trained) == (0 if mine is None else 3 if config.method == "dora" else 2)
        for param, of_one in zip(trained.values(), grads, strict=True):
            check(param.grad, of_one)


def slices(counts: tuple[int, ...]) -> list[slice]:
    ends = torch.tensor((0, *counts)).cumsum(0).tolist()
    return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]


def test_the_weight_is_dequantized_once_and_its_bytes_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward read it once each, whatever the number of adapters."""
    calls: list[int] = []
    rows = NF4Tensor.dequantize_rows

    def counted(*args: object, **more: object) -> Tensor:
        calls.append(1)
        return rows(*args, **more)

    monkeypatch.setattr(NF4Tensor, "dequantize_rows", counted)
    linear, kept = several(base("nf4", torch.bfloat16)), list[Tensor]()
    with saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = linear(torch.randn(6, 7, 64, dtype=torch.bfloat16, requires_grad=True))
    y.sum().backward()
    assert len(calls) == 2
    weight = linear.weight
    assert sum(t.data_ptr() == weight.qdata.data_ptr() for t in kept) == 1
    assert not [t for t in kept if t.numel() == 48 * 64]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("with_dora", [True, False])
def test_checkpointing_changes_no_bit(mode: str, with_dora: bool) -> None:
    """Its small products are added into the large one's result, which selective checkpointing
    keeps; full checkpointing does not compute the last one again."""
    first, last = several(base("nf4", torch.float32)), several(base("nf4", torch.float32))
    if not with_dora:
        for linear in (first, last):
            part = linear.part("dora")
            assert part is not None
            part.magnitude = part.weight_norm = None

    def block(x: Tensor) -> Tensor:
        return last(F.pad(F.silu(first(x)), (0, 16)))

    x, target = torch.randn(6, 7, 64, requires_grad=True), torch.randn(6, 7, 48)
    trained = [x, *(p for p in [*first.parameters(), *last.parameters()] if p.requires_grad)]
    expected = torch.autograd.grad((block(x) - target).square().sum(), trained, allow_unused=True)
    checked = checkpointed(block, mode, x)
    found = torch.autograd.grad((checked - target).square().sum(), trained, allow_unused=True)
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None) and (own is None or torch.equal(own, other))


def test_errors_name_the_adapter_and_leave_paths_alone() -> None:
    expected = "^adapters.one.rank: '/my_adapter.v2/adapter.old'$"
    with pytest.raises(UserError, match=expected), named("one"):
        raise UserError("adapter.rank: '/my_adapter.v2/adapter.old'")
