"""Quantized experts against a dequantized weight in plain PyTorch, and what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from qfsdp.modules.decoder_parts import ExpertsConfig
from qfsdp.modules.experts import product as expert_product
from qfsdp.modules.experts.stacked import Experts, dispatch
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 6, 2, 32, 16, 50
FORMAT_NAMES = ["nf4", "nf4_fp32_absmax", "hqq"]


def quantized(weight: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    made = FORMATS[format].empty(*weight.shape, dtype, "cpu")
    made.quantize_(weight)
    return made


def experts(format: str = "nf4", dtype: torch.dtype = torch.float32, **changes: Any) -> Experts:
    """Frozen, quantized; `format` "": plain."""
    torch.manual_seed(0)
    module = Experts(HIDDEN, ExpertsConfig(EXPERTS, TOP_K, INNER, **changes))
    for linear in (module.gate_up_proj, module.down_proj):
        weight = torch.randn_like(linear.weight) * linear.weight.shape[1] ** -0.5
        made = quantized(weight, format, dtype) if format else weight.to(dtype)
        linear.weight = nn.Parameter(made, requires_grad=False)
        if linear.bias is not None:
            linear.bias = nn.Parameter(torch.randn(linear.bias.shape, dtype=dtype))
    return module


def routed(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    """Tokens, their experts (one of which has no token) and weights."""
    x = torch.randn(tokens, HIDDEN, dtype=dtype).requires_grad_()
    scores = torch.rand(tokens, EXPERTS)
    scores[:, 3] = 0
    weights, chosen = scores.topk(TOP_K)
    return x, chosen, weights.to(dtype).requires_grad_()


def one_by_one(module: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The definition: every token by itself."""
    wholes = []
    for linear in (module.gate_up_proj, module.down_proj):
        weight = linear.weight
        weight = weight.dequantize() if hasattr(weight, "dequantize_rows") else weight
        bias = torch.zeros(len(weight), dtype=x.dtype) if linear.bias is None else linear.bias
        wholes.append((weight.unflatten(0, (EXPERTS, -1)), bias.unflatten(0, (EXPERTS, -1))))
    (first, bias1), (second, bias2) = wholes
    y = []
    for token, experts_of, weights_of in zip(x, chosen, weights, strict=True):
        gate_up = torch.einsum("koi,i->ko", first[experts_of], token) + bias1[experts_of]
        inner = module.activated(gate_up)
        out = torch.einsum("koi,ki->ko", second[experts_of], inner) + bias2[experts_of]
        y.append((out * weights_of.unsqueeze(1)).sum(0))
    return torch.stack(y)


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), inputs)


def assert_close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert (found - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("format", ["", *FORMAT_NAMES])
@pytest.mark.parametrize("changes", [{}, {"bias": True, "interleaved": True}])
def test_experts_equal_every_token_by_itself(format: str, changes: dict[str, Any]) -> None:
    module = experts(format, **changes)
    given = routed()
    wanted = [given[0], given[2], *(p for p in module.parameters() if p.requires_grad)]
    y, expected = module(*given), one_by_one(module, *given)
    assert_close(y, expected, 1e-5)
    of_each = zip(gradients(y, *wanted), gradients(expected, *wanted), strict=True)
    for found, want in of_each:
        assert_close(found, want, 1e-5)


def test_dispatch_sorts_by_expert_and_keeps_the_order_of_tokens() -> None:
    chosen = torch.tensor([[2, 0], [0, 4], [4, 2]])
    order, places, ends = dispatch(chosen, 5)
    assert order.tolist() == [1, 2, 0, 5, 3, 4]
    assert ends.tolist() == [2, 2, 4, 4, 6] and ends.dtype == torch.int32
    assert chosen.flatten()[order][places].equal(chosen)


# ---- grouped products ---------------------------------------------------------------------------
# On a CPU `grouped_mm` is slow, but it exists.


@pytest.mark.parametrize("chunk", [1 << 30, 2 * 2 * 2 * INNER * HIDDEN, 1])  # all, 2 and 1 experts
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_equal_the_loop(
    chunk: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = experts(dtype=torch.bfloat16).gate_up_proj.weight
    chosen = routed()[1]
    ends = dispatch(chosen, EXPERTS).ends
    x = torch.randn(chosen.numel(), 2 * INNER if transposed else HIDDEN).bfloat16()
    ratio = torch.rand(len(weight)) + 0.5
    given = (x, ends, weight.qdata, weight.metadata, HIDDEN, "nf4", 0, ratio, transposed, chunk)
    expected = expert_product.expert_product(*given)
    calls: list[int] = []
    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(expert_product, "takes_grouped", lambda *_: True)
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    assert_close(expert_product.expert_product(*given), expected, 1e-2)
    # The expert without tokens is not computed where it is alone in its chunk.
    assert len(calls) == {1 << 30: 1, 1: EXPERTS - 1}.get(chunk, EXPERTS // 2)


def test_grouped_gradient_of_weights_equals_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = routed()[1]
    ends = dispatch(chosen, EXPERTS).ends
    grad, x = (torch.randn(chosen.numel(), size).bfloat16() for size in (2 * INNER, HIDDEN))
    expected = expert_product.weight_gradient(grad, x, ends)
    monkeypatch.setattr(expert_product, "takes_grouped", lambda *_: True)
    found = expert_product.weight_gradient(grad, x, ends)
    assert_close(found, expected, 1e-2)
    assert found.unflatten(0, (EXPERTS, -1))[3].abs().max() == 0  # no tokens


# ---- what autograd keeps ------------------------------------------------------------------------


def kept_bytes(module: Any, given: tuple[Tensor, ...], weights: set[int]) -> tuple[int, int]:
    """Bytes of storages that forward keeps: of weights, and of all else but the inputs."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(*given)
    of_weights = sum(size for where, size in kept.items() if where in weights)
    for where in (*weights, *(t.untyped_storage().data_ptr() for t in given)):
        kept.pop(where, None)
    y.sum().backward()
    return of_weights, sum(kept.values())


def storages(module: nn.Module) -> dict[int, int]:
    parts = [getattr(p, "qdata", p) for p in module.parameters()]
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_autograd_keeps_bytes_inputs_and_routing(compiled: bool) -> None:
    """Of the weights their bytes; of a choice of a token gate and up, silu(gate) * up, which
    compiled layers compute again, and the place; nothing else of the size of tokens or weights,
    and as much as the layer in bf16."""
    tokens, kept = 400, {}
    for format in ("nf4", ""):
        module = experts(format, torch.bfloat16)
        given = routed(torch.bfloat16, tokens)
        run: Any = torch.compile(module, backend="aot_eager") if compiled else module
        of_weights, kept[format] = kept_bytes(run, given, set(storages(module)))
        assert of_weights <= sum(storages(module).values())
    assert kept["nf4"] <= kept[""] + 4096  # scales of scales
    of_choice = 2 * (2 * INNER + 1) + 3 * 8  # gate and up, the weight; order, place and token
    if not compiled:
        of_choice += 2 * 2 * INNER - 8  # silu(gate), silu(gate) * up; the token is in order
    assert kept["nf4"] <= tokens * TOP_K * of_choice + 4096


@pytest.mark.long
def test_compiled_experts_are_one_graph_for_any_number_of_tokens() -> None:
    module = experts()
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (TOKENS, 2 * TOKENS, 77):
        given = routed(tokens=tokens)
        y, expected = run(*given), module(*given)
        assert_close(y, expected, 1e-6)
        for found, want in zip(
            gradients(y, given[0], given[2]), gradients(expected, given[0], given[2]), strict=True
        ):
            assert_close(found, want, 1e-6)
    assert counters["stats"]["unique_graphs"] == 1
