"""Attention of the decoder: over rows, or over the documents that are packed into rows.

Packed rows hold several samples one after the other. `attend_documents` lets each see itself
alone, at the cost of its own length squared and without a mask over the row: by FlashAttention's
kernel for sequences of various lengths on GPUs (arXiv:2307.08691), elsewhere by one document after
the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.tensor_subclasses.kernels.cpu import product_dtype
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op

aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention, causal where `mask` is None.

    `q` is `[batch, heads, seq, head_dim]`, `k` and `v` have `kv_heads` of them (a divisor),
    `mask` is bool and broadcasts to `[batch, heads, seq, seq]` (True: attend). Returns q's shape.
    """
    # Sharing k/v inside the kernel took 77.1 ms against 78.9 repeated and 77.7 expanded in bf16
    # (93.4, 105.8, 97.1 in fp32; 9/3 heads of 64, batch 4, seq 512, forward + backward on one CPU
    # core), always with flash attention. On CUDA, flash shares but takes neither masks nor fp32,
    # and the memory-efficient kernel, which takes both, cannot share: asked to, PyTorch falls back
    # to the math path with its seq x seq matrix. So k/v are expanded in those two cases.
    if (dtype := product_dtype(q)) != q.dtype:
        return _attend_in(dtype, q, k, v, mask)
    share = mask is None and q.dtype != torch.float32
    if not share and q.shape[1] != k.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=share)


def _attend_in(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`attend` in another dtype. The op for documents, where it serves, keeps none of that: rows
    without a mask are documents of one length."""
    if mask is not None:
        return attend(q.to(dtype), k.to(dtype), v.to(dtype), mask).to(q.dtype)
    batch, seq = q.shape[0], q.shape[2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seq
    return attend_documents(q, k, v, ends, seq)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of one new token per row to what is cached of the row.

    `q` is `[batch, heads, 1, head_dim]`, `k` and `v` are `[batch, kv_heads, slots, head_dim]` with
    at least as many slots as `mask`, bool `[batch, 1, 1, seen]` (True: attend), has. Returns q's
    shape.
    """
    # The heads of a group stand as queries of one head: nothing of the cache is expanded.
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    seen = mask.shape[3]
    y = F.scaled_dot_product_attention(grouped, k[:, :, :seen], v[:, :, :seen], mask)
    return y.reshape(q.shape)


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, window: int | None = None
) -> Tensor:
    """Grouped-query attention, causal within each document and blind to all others.

    Args:
        q: `[batch, heads, seq, head_dim]`, floating point.
        k, v: the same with `kv_heads` heads, a divisor of `heads`.
        cu_seqlens: int32 `[documents + 1]`, where documents start and end among the
            `batch * seq` tokens: from 0 to that number, never falling. Documents without tokens
            (repeated ends) are skipped.
        max_len: no document is longer. A bound is enough: give one that does not change from
            batch to batch, as it is a constant of a compiled graph.
        window: how many positions a token sees, itself included; None for all before it.

    Returns:
        q's shape and dtype.

    Raises:
        ValueError: `cu_seqlens` does not end at `batch * seq` (not looked at on GPUs in fp16 and
            bf16, where it would have to be waited for).
    """
    if window is not None and window >= max_len:
        window = None
    batch, _, seq, head_dim = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and _has_varlen(head_dim):
        out = _varlen(q, k, v, cu_seqlens, max_len, window)
    else:
        out = _AttendEach.apply(q, k, v, cu_seqlens, window)
    return out.unflatten(0, (batch, seq)).transpose(1, 2)


# ---- FlashAttention's kernel for sequences of various lengths ---------------------------------


@torch.compiler.assume_constant_result
def _has_varlen(head_dim: int) -> bool:
    """Whether this GPU and head size are FlashAttention's."""
    return head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability() >= (8, 0)


@torch.compiler.assume_constant_result
def _varlen_shares_heads() -> bool:
    """Whether `varlen_attn` takes fewer k/v heads; torch 2.11 has no such argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, window: int | None
) -> Tensor:
    """`_attend_each` by `varlen_attn`; `[tokens, heads, head_dim]`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if q.shape[1] != k.shape[1]:
        if _varlen_shares_heads():
            options["enable_gqa"] = True
        else:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, **options)
    return cast(Tensor, out)


# ---- one document after the other -------------------------------------------------------------
# Two custom ops, so that torch.compile neither breaks its graph at the loop nor builds one
# for every list of lengths. Saved for backward: q, k, v, out and its logsumexp. CPUs have a flash
# kernel of their own: 0.14 s against 0.18 of plain products for documents of 256 tokens, 0.25
# against 1.54 for 1024 (forward + backward of 4096 tokens, 9/3 heads of 64, bf16, one core).


def _documents(cu_seqlens: Tensor, tokens: int) -> Iterator[slice]:
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(f"cu_seqlens goes from {ends[0]} to {ends[-1]}, the tokens to {tokens}")
    return (slice(a, b) for a, b in zip(ends, ends[1:], strict=False) if a < b)


@custom_op("qfsdp::attend_documents")
def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention `[tokens, heads, head_dim]` and its logsumexp `[tokens, heads]`, at least fp32."""
    forward: Callable[..., Any] = _flash_forward if q.device.type == "cpu" else _plain_forward
    (out, logsumexp), dtype = _empty_outputs(q), product_dtype(q)
    for chosen in _documents(cu_seqlens, len(q)):
        given = (t[chosen].to(dtype) for t in (q, k, v))
        part = forward(*_heads_first(*given), window)
        out[chosen], logsumexp[chosen] = part[0][0].transpose(0, 1), part[1][0].T
    return out, logsumexp


@custom_op("qfsdp::attend_documents_backward")
def _attend_each_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    backward: Callable[..., Any] = _flash_backward if q.device.type == "cpu" else _plain_backward
    grads = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    dtype = product_dtype(q)
    for chosen in _documents(cu_seqlens, len(q)):
        given = _heads_first(*(t[chosen].to(dtype) for t in (grad, q, k, v, out)))
        parts = backward(*given, logsumexp[chosen].T[None], window)
        for whole, part in zip(grads, parts, strict=True):
            whole[chosen] = part[0].transpose(0, 1)
    return grads


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """`[len, heads, head_dim]` -> `[1, heads, len, head_dim]`, as the kernels take them."""
    return [t.transpose(0, 1).unsqueeze(0) for t in tensors]


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    at_least_fp32 = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=at_least_fp32)


@torch.library.register_fake("qfsdp::attend_documents")
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


@torch.library.register_fake("qfsdp::attend_documents_backward")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _AttendEach(torch.autograd.Function):
    """Attention `[tokens, heads, head_dim]`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None
    ) -> Tensor:
        out, logsumexp = _attend_each(q, k, v, cu_seqlens, window)
        ctx.window = window
        ctx.save_for_backward(q, k, v, out, logsumexp, cu_seqlens)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_attend_each_backward(grad, *ctx.saved_tensors, ctx.window), None, None


def _near(q: Tensor, window: int | None) -> Tensor:
    """Bool `[len, len]`: where a token of one document sees another."""
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    return seen if window is None else seen.triu(1 - window)


def _flash_options(q: Tensor, window: int | None) -> dict[str, Any]:
    if window is None or q.shape[-2] <= window:
        return {"is_causal": True}
    far = ~_near(q, window)
    return {"is_causal": False, "attn_mask": q.new_zeros(far.shape).masked_fill_(far, -torch.inf)}


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` calls on CPUs; k/v may have fewer heads."""
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **_flash_options(q, window))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    options = _flash_options(q, window)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, dropout_p=0.0, **options)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Any device and dtype; holds the scores of one document, `[heads, len, len]`."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = _scores(q, k, window)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k.shape[1]
    k, v = (t.repeat_interleave(q.shape[1] // kv_heads, dim=1) for t in (k, v))
    weights = (_scores(q, k, window) - lse.unsqueeze(-1)).exp()
    # The softmax's gradient: each row's mean of d(weights) is the product of out and its gradient.
    mean = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    of_scores = weights * (grad @ v.mT - mean) * q.shape[-1] ** -0.5
    of_k, of_v = of_scores.to(q.dtype).mT @ q, weights.to(q.dtype).mT @ grad
    of_k, of_v = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in (of_k, of_v))
    return of_scores.to(q.dtype) @ k, of_k, of_v


def _scores(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    return scores.masked_fill_(~_near(q, window), -torch.inf)
