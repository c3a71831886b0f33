"""Prompts that stand once in packed rows: attention, models and compiled layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qfsdp.data.preferences.shared_prompts import SharedDocuments, share_documents
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.attention import documents as document_attention
from qfsdp.modules.attention import shared_prompts as shared_attention
from qfsdp.modules.attention.documents import attend_documents
from qfsdp.modules.attention.shared_prompts import attend_shared
from qfsdp.training.preference import sequence_logprobs
from tests.modules.test_attention import SEQ, heads, tiny
from tests.preferences import preference_batch, random_samples
from tests.tiny import needs_compiler

pytestmark = pytest.mark.usefixtures("eager")
# Three rows: two pairs, a document that shares nothing, padding; one pair; padding.
LENGTHS = [10, 4, 12, 3, 5, 6, 30, 9, 1, 40]
SHARED = [0, 6, 0, 11, 0, 0, 0, 20, 0, 0]


def oracle(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """A softmax over all scores of all rows, with a column for the sinks."""
    own, before = torch.tensor(LENGTHS), torch.tensor(SHARED)
    number = torch.arange(len(own)).repeat_interleave(own)
    starts = (own.cumsum(0) - own)[number]
    place = torch.arange(3 * SEQ) - starts
    position = place + before[number]
    same = number[:, None] == number
    of_prompt = (number[:, None] == number + 1) & (place < before[number][:, None])
    distance = position[:, None] - position
    mask = (same | of_prompt) & (distance >= 0)
    mask = mask if window is None else mask & (distance < window)
    q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    column = sinks.view(-1, 1, 1).expand(-1, 3 * SEQ, 1)
    y = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ v
    return y.transpose(0, 1).unflatten(0, (3, SEQ)).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_that_of_a_mask(window: int | None, sinks: bool) -> None:
    """In fp64, with all gradients; only the inputs are kept for backward."""
    q, k, v, grad = heads()
    of_heads = torch.randn(6, dtype=torch.float64).requires_grad_() if sinks else None
    given = (q, k, v) if of_heads is None else (q, k, v, of_heads)
    documents = share_documents(LENGTHS, SHARED)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        found = attend_shared(q, k, v, of_heads, documents, SEQ, window)
    assert sorted(t.numel() for t in kept) == sorted(t.numel() for t in (*documents, *given))
    none = torch.full((6,), -torch.inf, dtype=torch.float64)
    expected = oracle(q, k, v, none if of_heads is None else of_heads, window)
    gradients = torch.autograd.grad(found, given, grad)
    wanted = torch.autograd.grad(expected, given, grad)
    for mine, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_a_kernel_with_a_gradient_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `varlen_attn`, FlashAttention's for GPUs, has one."""
    calls: list[str] = []

    @torch.library.custom_op("tests::attend", mutates_args=())
    def kernel(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return document_attention.attend_each(q, k, v, ends, None)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        calls.append("backward")
        given = (grad.contiguous(), *ctx.saved_tensors, None)
        return *document_attention.attend_each_backward(*given), None

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any) -> Tensor:
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        return kernel(*flat, ends).unsqueeze(0).transpose(1, 2)

    kernel.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    q, k, v, grad = heads()
    documents, results = share_documents(LENGTHS, SHARED), []
    for how in (attend_documents, attend):
        monkeypatch.setattr(shared_attention, "attend_documents", how)
        out = attend_shared(q, k, v, None, documents, SEQ)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
    assert calls == ["backward"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_operator_contract() -> None:
    """Fake results and strides of the custom ops, as torch.compile relies on them."""
    q, k, v, grad = (t.detach().transpose(1, 2).flatten(0, 1).float() for t in heads())
    sinks, documents = torch.randn(6), share_documents(LENGTHS, SHARED)
    for of_heads in (None, sinks):
        given = (q, k, v, of_heads, *documents, SEQ, 7, None)
        torch.library.opcheck(shared_attention.attend_op, given)
        torch.library.opcheck(shared_attention.attend_backward_op, (grad.contiguous(), *given))


def test_documents_are_written_out() -> None:
    documents = share_documents(LENGTHS, SHARED)
    ends = torch.tensor(LENGTHS).add(torch.tensor(SHARED)).cumsum(0).tolist()
    assert len(documents.cu_seqlens) == 64
    assert documents.cu_seqlens[: len(ends) + 1].tolist() == [0, *ends]
    assert documents.cu_seqlens[-1] == ends[-1] == len(documents.sources)
    assert torch.equal(documents.sources[documents.places], torch.arange(3 * SEQ))
    assert documents.sources[10:20].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    assert documents.sources.bincount().max() == 2


def logprobs_and_gradients(model: Any, batch: Any) -> list[Tensor]:
    found = sequence_logprobs(model, batch)
    trained = [param for param in model.parameters() if param.requires_grad]
    weights = torch.linspace(-1, 2, len(found))
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), trained)]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_pairs_are_those_of_padded_rows(name: str, checkpointing: Any, tmp_path: Path) -> None:
    model, samples = tiny(tmp_path, name), random_samples(6)
    model.set_activations(ActivationConfig(checkpointing, offload=checkpointing == "none"))
    padded, packed = preference_batch(samples), preference_batch(samples, slots=64)
    assert isinstance(packed.documents, SharedDocuments)
    assert packed.num_tokens == padded.num_tokens - sum(n - 1 for _, n in samples[::2])
    expected = logprobs_and_gradients(model, padded)
    for mine, theirs in zip(logprobs_and_gradients(model, packed), expected, strict=True):
        assert theirs.norm() > 0
        assert (mine - theirs).norm() < 2e-5 * theirs.norm()  # measured: at most 1e-6


@needs_compiler
@pytest.mark.slow
def test_compiled_layers(tmp_path: Path) -> None:
    """Equal, and other pairs build nothing new."""
    model, compiled = tiny(tmp_path / "a"), tiny(tmp_path / "b")
    torch._dynamo.reset()
    for layer in compiled.model.layers:
        layer.block, layer.compiled = torch.compile(layer.block, fullgraph=True), True
    builds = []
    for seed in range(3):
        batch = preference_batch(random_samples(6, seed=seed), slots=64)
        found = logprobs_and_gradients(compiled, batch)
        builds.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        for mine, theirs in zip(found, logprobs_and_gradients(model, batch), strict=True):
            assert (mine - theirs).norm() < 2e-5 * theirs.norm()
    assert builds[0] == builds[2]
