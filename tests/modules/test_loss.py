"""The loss in chunks has the value and the gradients of the loss of whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qfsdp.modules import loss as loss_module
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.loss import head_loss
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.tensor_subclasses import frozen_weight, nf4
from tests.models import adapted_model, randomize_adapters, summed_cross_entropy
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
VOCABULARY, HIDDEN = 577, 192


HEADS = ["plain", "plain lora", "plain dora", "packed", "packed lora", "packed dora", "trained"]


def head_of(name: str) -> nn.Module:
    """One of `HEADS`. Each has other weights, the same in every call."""
    torch.manual_seed(HEADS.index(name))
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    if name == "trained":
        return linear
    weight, _, method = name.partition(" ")
    base: nn.Linear | QuantizedLinear = linear
    if weight == "packed":
        base = QuantizedLinear(nf4.quantize(linear.weight.detach()), None)
    base.requires_grad_(False)
    if not method:
        return base
    head = LowRankLinear(base, AdapterConfig(method, rank=5))
    for param in head.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.1)
    if head.weight_norm is not None:
        nn.init.uniform_(head.weight_norm, 0.5, 1.5)
    return head


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    trained = [param for param in head.parameters() if param.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss * 0.37, [hidden, *trained])]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20], ids=["1 token", "7 tokens", "all"])
@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_in_chunks(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", chunk * VOCABULARY)
    monkeypatch.setattr(loss_module, "GRADIENT_CHUNK_WEIGHTS", 100 * HIDDEN)
    monkeypatch.setattr(frozen_weight, "NORM_CHUNK_WEIGHTS", 100 * HIDDEN)
    head, generator = head_of(name), torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 20, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (3, 20), generator=generator)
    labels[0, :9] = labels[2] = -100
    expected = gradients(summed_cross_entropy(head(hidden), labels), hidden, head)
    found = gradients(head_loss(head, hidden, labels), hidden, head)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_no_target_at_all() -> None:
    """A rank without samples still takes part in the backward pass."""
    hidden = torch.randn(1, 8, HIDDEN, requires_grad=True)
    head = head_of("plain lora")
    loss = head_loss(head, hidden, torch.full((1, 8), -100))
    assert [g.abs().max().item() for g in gradients(loss, hidden, head)] == [0.0] * 4


def test_without_gradients() -> None:
    hidden, labels = torch.randn(1, 8, HIDDEN), torch.arange(8).unsqueeze(0)
    head = head_of("packed")
    with torch.no_grad():
        loss = head_loss(head, hidden, labels)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, summed_cross_entropy(head(hidden), labels))


def test_a_trained_head_is_left_alone_where_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of its weight would be the largest tensor of a validation."""
    hidden, labels, head = torch.randn(1, 8, HIDDEN), torch.arange(8)[None], head_of("trained")
    expected = summed_cross_entropy(head(hidden), labels)

    def gradients(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(loss_module, "_of_plain", gradients)
    with pytest.raises(NotImplementedError):
        head_loss(head, hidden, labels)
    with torch.no_grad():
        torch.testing.assert_close(head_loss(head, hidden, labels), expected)


def test_a_trained_heads_gradient_is_added_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, in 150 chunks of the tokens: nearly as exact as PyTorch's loss of all tokens at once
    (1.2 times its error; 5.3 times if chunks were added up in bf16)."""
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 2 * VOCABULARY)
    torch.manual_seed(0)
    exact = nn.Linear(HIDDEN, VOCABULARY, bias=False).double()
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False).bfloat16()
    with torch.no_grad():
        head.weight.copy_(exact.weight)
        exact.weight.copy_(head.weight)
    hidden = torch.randn(3, 100, HIDDEN).bfloat16()
    labels = torch.randint(0, VOCABULARY, (3, 100))
    errors = []
    loss = summed_cross_entropy(exact(hidden.double()), labels)
    (expected,) = torch.autograd.grad(loss, exact.weight)
    for loss in (head_loss(head, hidden, labels), summed_cross_entropy(head(hidden), labels)):
        (found,) = torch.autograd.grad(loss, head.weight)
        assert found.dtype == torch.bfloat16
        errors.append((found.double() - expected).norm() / expected.norm())
    print(f"error of the gradient: {errors[0]:.2e}, at once {errors[1]:.2e}")
    assert errors[0] < 1.5 * errors[1]


def test_the_largest_logits_are_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 5 * VOCABULARY)
    head, rows = head_of("packed lora"), []
    handle = head.register_forward_hook(lambda *_: rows.append("hooked"))
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda x: rows.append(len(x)) or forward(x))
    hidden = torch.randn(2, 9, HIDDEN, requires_grad=True)
    labels = torch.arange(18).view(2, 9)
    labels[0, 0] = -100
    head_loss(head, hidden, labels).backward()
    handle.remove()
    assert rows == [5, 5, 5, 2]


def test_the_decoder_gives_the_same_loss(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    model = adapted_model(folder, AdapterConfig("dora", 4, targets=["all-linear", "lm_head"]))
    randomize_adapters(model)
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    trained = [param for param in model.parameters() if param.requires_grad]
    whole = summed_cross_entropy(model(tokens), labels)
    chunked = model(tokens, labels=labels)
    torch.testing.assert_close(chunked, whole)
    expected, found = (torch.autograd.grad(loss, trained) for loss in (whole, chunked))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
