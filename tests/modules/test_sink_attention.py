"""Attention with sinks against the softmax over all logits, the sink among them, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qfsdp.modules.attention import sinks as sink_attention
from qfsdp.modules.attention.sinks import attend_cached_with_sinks, attend_with_sinks
from tests.modules.test_attention import ENDS, SEQ, cu_seqlens, heads

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}
ROWS = torch.tensor([0, 40, 80, 120], dtype=torch.int32)


def logits(count: int = 6) -> Tensor:
    sinks = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (2 * sinks).requires_grad_()


def by_softmax(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, ends: Tensor, window: int | None
) -> Tensor:
    """All scores of rows at once, with one more column."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    document = torch.searchsorted(ends, torch.arange(3 * SEQ), right=True).view(3, SEQ)
    mask = (document[:, :, None] == document[:, None]).tril()
    mask = mask if window is None else mask.triu(1 - window)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask.unsqueeze(1), -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ v


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a document."""
    monkeypatch.setattr(sink_attention, "BLOCK", 16)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(("kv_heads", "packed"), [(1, True), (2, False), (2, True), (6, False)])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.usefixtures("small_blocks")
def test_equals_the_softmax(
    window: int | None, kv_heads: int, packed: bool, dtype: torch.dtype
) -> None:
    q, k, v, grad = heads(kv_heads=kv_heads, dtype=dtype)
    sinks = logits().detach().to(dtype).requires_grad_()
    ends = cu_seqlens() if packed else None
    found = attend_with_sinks(q, k, v, sinks, ends, SEQ, window)
    assert found.shape == q.shape and found.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    expected = by_softmax(*exact, cu_seqlens() if packed else ROWS, window)
    gradients = torch.autograd.grad(found, [q, k, v, sinks], grad)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for mine, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        assert mine.dtype == dtype
        assert (mine - theirs).abs().max() < BOUNDS[dtype] * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("window", [None, 7])
def test_one_new_token_with_a_cache(window: int | None) -> None:
    q, k, v, _ = (t.detach() for t in heads())
    sinks, lengths = logits().detach(), torch.tensor([40, 23, 1])
    slots = torch.arange(SEQ)
    mask = slots < lengths[:, None]
    if window is not None:
        mask &= slots >= lengths[:, None] - window
    last = (torch.arange(3), slice(None), lengths - 1)
    found = attend_cached_with_sinks(q[last].unsqueeze(2), k, v, sinks, mask[:, None, None])
    expected = by_softmax(q, k, v, sinks, ROWS, window)[last]
    assert (found.squeeze(2) - expected).abs().max() < 1e-6


def test_operator_contract() -> None:
    q, k, v, grad = (t.detach().transpose(1, 2).flatten(0, 1).contiguous() for t in heads())
    for window in (None, 7):
        given = (cu_seqlens(), None, SEQ, SEQ, window, 0.3)
        sinks = logits().detach()
        torch.library.opcheck(sink_attention.attention, (q, k, v, sinks, *given))
        out, total = sink_attention.attention(q, k, v, sinks, *given)
        backward = (grad, q, k, v, cu_seqlens(), out, total, *given[1:])
        torch.library.opcheck(sink_attention.attention_backward, backward)


# ---- FlashAttention's kernels, which know of no sink --------------------------------------------


def weights(
    q: Tensor, k: Tensor, ends: Tensor, of_keys: Tensor, lse: Tensor | None, **how: Any
) -> Any:
    """Attention weights `[heads, queries, keys]` and the logarithms of their sums. The queries of a
    document are its last tokens."""
    places = []  # the document of every token, and how far it is from the document's end
    for x, bounds in ((q, ends), (k, of_keys)):
        at = torch.arange(len(x))
        document = torch.searchsorted(bounds, at, right=True)
        places.append((document, bounds[document] - at))
    (mine, left), (theirs, seen) = places
    before = seen - left[:, None]
    mask = (mine[:, None] == theirs) & (before >= 0)
    if how["window_size_left"] >= 0:
        mask &= before <= how["window_size_left"]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = how["scale"] * torch.einsum("ihd,jhd->hij", q, k)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse.unsqueeze(-1)).exp(), lse


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, of_keys: Tensor, *most: Any, **how: Any
) -> Any:
    for bounds, longest in ((ends, most[0]), (of_keys, most[1])):
        assert bounds.dtype == torch.int32 and bounds.diff().max() <= longest
    p, lse = weights(q, k, ends, of_keys, None, **how)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hij,jhd->ihd", p, v), lse, None, None, None


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any, **how: Any
) -> Any:
    group, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
    p, _ = weights(q, k, *given[:2], lse, **how)
    repeated = v.repeat_interleave(group, dim=1)
    products = (grad * out).sum(-1).T.unsqueeze(-1)
    ds = how["scale"] * p * (torch.einsum("ihd,jhd->hij", grad, repeated) - products)
    dq = torch.einsum("hij,jhd->ihd", ds, k.repeat_interleave(group, dim=1))
    dk, dv = torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihd->jhd", p, grad)
    return dq, *(t.unflatten(1, (kv_heads, group)).sum(2) for t in (dk, dv))


@pytest.mark.parametrize("window", [None, 7])
def test_how_flash_attention_is_called(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels, as formulas, give the gradients with a sink."""
    monkeypatch.setattr(sink_attention, "has_kernel", lambda q: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    assert ENDS[-1] == 3 * SEQ
    q, k, v, grad = heads()
    given = [q, k, v, logits()]
    found = attend_with_sinks(*given, cu_seqlens(), SEQ, window)
    expected = by_softmax(*given, cu_seqlens(), window)
    mine, theirs = (torch.autograd.grad(y, given, grad) for y in (found, expected))
    for one, other in zip((found, *mine), (expected, *theirs), strict=True):
        assert (one - other).abs().max() < 1e-12 * max(1.0, other.abs().max().item())
