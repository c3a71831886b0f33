"""LoRA and DoRA on the stacked linears of experts, against the products multiplied out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import LowRankExpertLinear, init_adapters
from qfsdp.modules.experts.stacked import ExpertLinear
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.tensor_subclasses import frozen_weight
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

EXPERTS, OUT, IN, RANK = 5, 6, 64, 3
COUNTS = (4, 0, 1, 7, 2)  # rows of each expert; one has none


pytestmark = pytest.mark.usefixtures("eager")


def made(
    method: str, format: str = "none", bias: bool = False, shared: Any = None
) -> LowRankExpertLinear:
    """An adapted linear of experts with values as after training."""
    torch.manual_seed(0)
    base = ExpertLinear(EXPERTS, IN, OUT, bias)
    nn.init.normal_(base.weight)
    if base.bias is not None:
        nn.init.normal_(base.bias)
    if format != "none":
        quantized = FORMATS[format].empty(EXPERTS * OUT, IN, torch.float32, torch.device("cpu"))
        quantized.quantize_(iter([base.weight.detach()]), "weight")
        base.weight = nn.Parameter(quantized, requires_grad=False)
    module = LowRankExpertLinear(base, AdapterConfig(method, RANK, 7.0), shared)
    init_adapters(module, seed=0)
    nn.init.normal_(module.lora_B, std=0.3)
    if module.magnitude is not None:
        module.magnitude.data.mul_(1 + 0.1 * torch.randn(EXPERTS * OUT))
    refresh_dora_norms(module)
    return module


def plain(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()


def multiplied_out(module: LowRankExpertLinear, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs for rows of `COUNTS`, in fp64 with a whole weight for each expert, and the leaves
    that they depend on."""
    leaves = {
        name: getattr(module, name).detach().double().requires_grad_()
        for name in ("lora_A", "lora_B", "magnitude")
        if getattr(module, name) is not None
    }
    leaves["x"] = x.detach().double().requires_grad_()
    weights = plain(module.weight).double().view(EXPERTS, OUT, IN)
    a, b = leaves["lora_A"].view(-1, RANK, IN), leaves["lora_B"].view(-1, OUT, RANK)
    weights = weights + 7.0 / RANK * (b @ a)  # one of an A or B that experts share
    if "magnitude" in leaves:
        lengths = weights.detach().norm(dim=2)
        weights = weights * (leaves["magnitude"].view(EXPERTS, OUT) / lengths).unsqueeze(2)
    parts = [rows @ w.t() for rows, w in zip(leaves["x"].split(COUNTS), weights, strict=True)]
    y = torch.cat(parts)
    if module.bias is not None:
        bias = module.bias.double().view(EXPERTS, OUT)
        y = y + bias.repeat_interleave(torch.tensor(COUNTS), 0)
    return y, leaves


def relative(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None and theirs is not None
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("shared", [None, "lora_A", "lora_B"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", ["none", "nf4", "hqq"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_outputs_and_gradients_equal_the_product_multiplied_out(
    method: str, format: str, bias: bool, shared: Any
) -> None:
    module = made(method, format, bias, shared)
    x = torch.randn(sum(COUNTS), IN, requires_grad=True)
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    grad = torch.randn(sum(COUNTS), OUT)
    y = module(x, ends)
    y.backward(grad)
    expected, leaves = multiplied_out(module, x)
    expected.backward(grad.double())
    assert relative(y, expected) < 1e-5
    for name, leaf in leaves.items():
        ours = x.grad if name == "x" else getattr(module, name).grad
        assert relative(ours, leaf.grad) < 1e-5, name
    assert module.of_each.grad is not None
    assert not module.of_each.grad.unflatten(0, (EXPERTS, -1))[COUNTS.index(0)].any()  # unused


@pytest.mark.parametrize("shared", [None, "lora_A", "lora_B"])
@pytest.mark.parametrize("chunk", [1, 7 * IN, 1 << 22])
@pytest.mark.parametrize("format", ["none", "nf4"])
def test_norms_are_those_of_the_adapted_rows_in_pieces_of_any_size(
    format: str, chunk: int, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_weight, "NORM_CHUNK_WEIGHTS", chunk)
    module = made("dora", format, shared=shared)
    a = module.lora_A.detach().double().view(-1, RANK, IN)
    b = module.lora_B.detach().double().view(-1, OUT, RANK)
    adapted = plain(module.weight).double().view(EXPERTS, OUT, IN) + 7.0 / RANK * (b @ a)
    assert module.weight_norm is not None
    assert relative(module.weight_norm, adapted.norm(dim=2).flatten()) < 1e-6


def test_kept_for_backward_are_inputs_bytes_and_numbers_of_the_rank() -> None:
    module = made("dora", "nf4")
    kept: list[Tensor] = []
    x = torch.randn(sum(COUNTS), IN, requires_grad=True)
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = module(x, ends)
    own = {p.data_ptr() for p in (x, y, ends, module.lora_A, module.lora_B)}
    own |= {module.weight.qdata.data_ptr(), *(t.data_ptr() for t in module.weight.metadata)}
    others = {t.data_ptr(): t.numel() for t in kept if t.data_ptr() not in own}
    # A x of every row; magnitude, norm and their ratio.
    assert sum(others.values()) <= sum(COUNTS) * RANK + 3 * EXPERTS * OUT


def test_dropout_is_on_the_input_of_the_product() -> None:
    module = made("lora")
    module.dropout = 0.5
    module.weight.data.zero_()
    x, ends = torch.ones(400, IN), torch.tensor([400, 400, 400, 400, 400], dtype=torch.int32)
    nn.init.ones_(module.lora_A)
    torch.manual_seed(3)
    sums = (module.train()(x, ends) / module(x, ends).mean(0)).std(0)
    assert sums.min() > 0.01  # rows differ
    assert torch.allclose(module.eval()(x, ends), module(x, ends))


@pytest.mark.parametrize(
    ("expert_rank", "rank", "top_k", "expected"),
    [(None, 16, 8, 16), (4, 16, 8, 4), ("divided", 16, 8, 2), ("divided", 4, 8, 1)],
)
def test_the_rank_of_experts(
    expert_rank: int | str | None, rank: int, top_k: int, expected: int
) -> None:
    config = AdapterConfig("lora", rank, 32.0, expert_rank=expert_rank).of_experts(top_k)
    assert config.rank == expected and config.scaling == 32.0 / expected
