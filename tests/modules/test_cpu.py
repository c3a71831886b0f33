"""On a CPU without bf16 products, models in bf16 multiply in fp32: all of them, everywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from qfsdp.modules import loss as loss_module
from qfsdp.modules.adapters import AdapterConfig, refresh_dora_norms
from qfsdp.modules.attention import attend
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.loss import head_loss, summed_cross_entropy
from qfsdp.modules.quantized_linear import linear
from qfsdp.modules.transformer import Decoder, Linear
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.kernels import cpu
from qfsdp.tensor_subclasses.kernels.cpu import product_dtype
from tests.models import adapted_model, randomize_adapters
from tests.tiny import TINY_CONFIG, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ("float", "c10::BFloat16", "double")
PRODUCTS = tuple(f"aten::{op}" for op in ("mm", "addmm", "bmm", "baddbmm", "mv", "_scaled_dot_pr"))


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BF16_PRODUCTS", False)


@pytest.mark.parametrize(
    ("has_products", "dtype", "device", "expected"),
    [
        (False, BF16, "cpu", FP32),
        (False, FP32, "cpu", FP32),
        (False, torch.float64, "cpu", torch.float64),
        (False, BF16, "meta", BF16),
        (True, BF16, "cpu", BF16),
        (True, FP32, "cpu", FP32),
    ],
)
def test_product_dtype(
    has_products: bool,
    dtype: torch.dtype,
    device: str,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "BF16_PRODUCTS", has_products)
    assert product_dtype(torch.empty(3, dtype=dtype, device=device)) == expected


def products(run: Callable[[], object], file: Path) -> Counter[str]:
    """How many matrix products `run` makes of which kinds of numbers."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    made = [e["args"]["Input type"] for e in events if e.get("name", "").startswith(PRODUCTS)]
    return Counter(kind for kinds in made for kind in sorted({k for k in kinds if k in KINDS}))


def train_step(model: Decoder, masked: bool = False, packed: bool = False) -> Tensor:
    tokens = torch.randint(TINY_CONFIG["vocab_size"], (2, 20), generator=torch.manual_seed(0))
    more: dict[str, Tensor] = {}
    if masked:
        more["mask"] = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril().triu(-6)
    if packed:
        more["positions"] = torch.cat((torch.arange(12), torch.arange(8))).repeat(2, 1)
        more["cu_seqlens"] = torch.tensor([0, 12, 20, 32, 40], dtype=torch.int32)
    loss = model(tokens, labels=tokens, **more) / 40
    loss.backward()
    return loss.detach()


def build(folder: Path, method: str, format: str) -> Decoder:
    if method != "full":
        config = AdapterConfig(method, 5, dropout=0.0 if method == "ia3" else 0.3)
        model = adapted_model(folder, config, format=format, dtype="bf16")
        randomize_adapters(model)
        return model
    torch.manual_seed(0)
    return Decoder(DecoderConfig.from_dir(folder)).to(BF16)


@pytest.mark.parametrize("rows", ["padded", "masked", "packed"])
@pytest.mark.parametrize(
    ("method", "format"),
    [("dora", "nf4"), ("lora", "none"), ("ia3", "hqq"), ("full", "none")],
)
def test_no_product_of_a_train_step_is_in_bf16(
    method: str, format: str, rows: str, tmp_path: Path, without_products: None
) -> None:
    model = build(write_tiny_model(tmp_path / "model"), method, format)

    def step() -> None:
        train_step(model, rows == "masked", rows == "packed")
        refresh_dora_norms(model)

    made = products(step, tmp_path / "trace.json")
    # Seven linears and attention in each of two layers, and the output layer: forward and backward.
    assert set(made) == {"float"} and made["float"] >= 2 * (2 * 8 + 1) - 4
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {
        BF16 if method == "full" else FP32
    }


@pytest.mark.parametrize(
    ("method", "format"), [("dora", "nf4"), ("lora", "none"), ("full", "none")]
)
def test_a_step_is_as_with_bf16_products(
    method: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the rounding of bf16, all gradients."""
    folder, steps = write_tiny_model(tmp_path / "model"), []
    for has_products in (True, False):
        monkeypatch.setattr(cpu, "BF16_PRODUCTS", has_products)
        model = build(folder, method, format)
        model.eval()  # without dropout
        loss = train_step(model)
        steps.append((loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, grads), (wide_loss, wide_grads) = steps
    assert wide_loss == pytest.approx(loss.item(), rel=2e-3) and wide_loss != loss
    assert grads.keys() == wide_grads.keys() and len(grads) >= 2 * 7
    for name, grad in grads.items():
        close = F.cosine_similarity(grad.float().flatten(), wide_grads[name].float().flatten(), 0)
        assert close > 0.999, name
        assert wide_grads[name].float().norm() == pytest.approx(
            grad.float().norm().item(), rel=0.03
        )


def test_products_are_rounded_once(without_products: None) -> None:
    x, weight = torch.randn(4, 6, 70, dtype=BF16), torch.randn(50, 70, dtype=BF16)
    x.requires_grad_(), weight.requires_grad_()
    y, expected = linear(x, weight), F.linear(x.float(), weight.float())
    grad = torch.randn_like(y)
    assert torch.equal(y, expected.to(BF16))
    of_fp32 = torch.autograd.grad(expected, [x, weight], grad.float())
    for ours, theirs in zip(torch.autograd.grad(y, [x, weight], grad), of_fp32, strict=True):
        assert torch.equal(ours, theirs)


def test_packed_weights_are_not_rounded_at_all(without_products: None) -> None:
    x = torch.randn(4, 6, 70, dtype=BF16, requires_grad=True)
    weight = nf4.quantize(torch.randn(50, 70, dtype=BF16))
    y, grad = linear(x, weight), torch.randn(4, 6, 50, dtype=BF16)
    numbers = weight.dequantize(FP32)
    assert weight.dtype == BF16 and not torch.equal(numbers, numbers.to(BF16))
    assert torch.equal(y, F.linear(x.float(), numbers).to(BF16))
    (of_x,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(of_x, (grad.float() @ numbers).to(BF16))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_rounded_once(masked: bool, without_products: None) -> None:
    q, k, v = (torch.randn(2, heads, 40, 16, dtype=BF16) for heads in (6, 2, 2))
    given = [t.requires_grad_() for t in (q, k, v)]
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril() if masked else None
    y = attend(q, k, v, mask)
    expected = attend(q.float(), k.float(), v.float(), mask)
    torch.testing.assert_close(y, expected.to(BF16), rtol=0, atol=0)
    grad = torch.randn_like(y)
    of_fp32 = torch.autograd.grad(expected, given, grad.float())
    for ours, theirs in zip(torch.autograd.grad(y, given, grad), of_fp32, strict=True):
        assert ours.dtype == BF16
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("method", "format"), [("dora", "nf4"), ("lora", "none"), ("full", "none")]
)
def test_no_more_is_kept_for_backward(
    method: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(write_tiny_model(tmp_path / "model"), method, format)
    model.eval()
    kept: dict[bool, dict[int, int]] = {True: {}, False: {}}
    alive = []
    for has_products, storages in kept.items():
        monkeypatch.setattr(cpu, "BF16_PRODUCTS", has_products)

        def keep(tensor: Tensor, into: dict[int, int] = storages) -> Tensor:
            alive.append(tensor.untyped_storage())
            into[alive[-1].data_ptr()] = alive[-1].nbytes()
            return tensor

        tokens = torch.arange(2 * 43).view(2, 43)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, labels=tokens)
    with_products, without = (sum(storages.values()) for storages in kept.values())
    ends = 2 * 3 * 4  # of the rows, for attention in each layer
    assert 100_000 < without == with_products + ends


@pytest.mark.parametrize("trained", [False, True])
def test_the_loss_casts_its_weight_once(
    trained: bool, monkeypatch: pytest.MonkeyPatch, without_products: None
) -> None:
    """And its chunks have half the logits, as those are in fp32 there."""
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 20 * 577)
    head = Linear(64, 577, bias=False).to(BF16).requires_grad_(trained)
    hidden = torch.randn(1, 35, 64, dtype=BF16, requires_grad=True)
    made: list[Tensor] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            if op is torch.ops.aten._to_copy.default:
                made.append(result)
            return result

    chunks: list[int] = []
    of_chunk = loss_module._loss_and_gradient_
    monkeypatch.setattr(
        loss_module, "_loss_and_gradient_", lambda *a: chunks.append(len(a[0])) or of_chunk(*a)
    )
    with Casts():
        loss = head_loss(head, hidden, torch.arange(35)[None])
    assert chunks == [10, 10, 10, 5]
    assert [t.dtype for t in made if t.shape == head.weight.shape] == [FP32]
    logits = F.linear(hidden.float(), head.weight.float())
    torch.testing.assert_close(loss, summed_cross_entropy(logits, torch.arange(35)[None]))
