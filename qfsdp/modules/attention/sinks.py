"""Attention with sinks (gpt-oss): each head has one more logit that no token stands for.

    p[i, j] = exp(s[i, j]) / (exp(sink) + sum over j of exp(s[i, j]))     o[i] = sum of p[i, j] v[j]

So a head can attend to nothing. With L[i] the logarithm of a row's sum without the sink, the result
is the usual one times `exp(L - total)`, where `total = log(exp(L) + exp(sink))`. For the gradient,
no kernel has to know of the sink: p[i, j] = exp(s[i, j] - total[i]), and

    ds[i, j] = p[i, j] * (do[i] . v[j] - do[i] . o[i])
    dsink    = -sum over i of exp(sink - total[i]) * (do[i] . o[i])

A kernel for the backward pass of usual attention takes o and L, and computes exactly this from the
scaled o and `total`. GPUs in fp16 and bf16 run FlashAttention's kernels for sequences of different
lengths (arXiv:2307.08691) that way, windows included. Elsewhere the formulas are computed for one
block of queries after the other.

Without sinks the formulas are those of usual attention. The two ops also serve queries that are
only the last of their document, see `cut_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.modules.attention.documents import documents, has_varlen
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op

BLOCK = 128  # queries; 64 heads with 4,096 keys: scores of 134 MB in fp32


def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor | None,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal grouped-query attention with a sink for each head.

    Args:
        q, k, v, cu_seqlens, max_len, window, scale: as of `attend_documents`. Without `cu_seqlens`
            every row is one document.
        sinks: `[heads]`, logits.

    Returns:
        q's shape and dtype.

    Raises:
        ValueError: as `attend_documents`.
    """
    if window is not None and window >= max_len:
        window = None
    batch, _, seq, head_dim = q.shape
    if cu_seqlens is None:
        cu_seqlens = seq * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = _AttendWithSinks.apply(q, k, v, sinks, cu_seqlens, max_len, window, scale)
    return out.unflatten(0, (batch, seq)).transpose(1, 2)


def attend_cached_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """`attend_cached` with a sink for each head, `[heads]`."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    seen = mask.shape[3]
    scores = (grouped @ k[:, :, :seen].transpose(2, 3)).float()
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    of_heads = sinks.float().view(1, k.shape[1], -1, 1).expand(len(q), -1, -1, 1)
    scores = torch.cat((scores.masked_fill(~mask, -torch.inf), of_heads), dim=-1)
    y = scores.softmax(-1)[..., :-1].to(v.dtype) @ v[:, :, :seen]
    return y.reshape(q.shape)


class _AttendWithSinks(torch.autograd.Function):
    """Attention `[tokens, heads, head_dim]`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        cu_seqlens: Tensor,
        max_len: int,
        window: int | None,
        scale: float,
    ) -> Tensor:
        ctx.how = None, max_len, max_len, window, scale
        out, total = attention(q, k, v, sinks, cu_seqlens, *ctx.how)
        ctx.save_for_backward(q, k, v, sinks, cu_seqlens, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *gradients(ctx, grad, attention_backward), None, None, None, None


def gradients(ctx: Any, grad: Tensor, backward: Callable[..., Any]) -> list[Tensor | None]:
    """Gradients of q, k, v and sinks, for a function whose forward has the results of `attention`.

    Args:
        ctx: has saved q, k, v, sinks, cu_seqlens, the two results and more tensors; `how` holds
            the arguments after them.
        backward: `attention_backward`, or an op with other arguments after `total`.
    """
    q, k, v, sinks, cu_seqlens, out, total, *more = ctx.saved_tensors
    of_qkv = backward(grad, q, k, v, cu_seqlens, out, total, *more, *ctx.how)
    if not ctx.needs_input_grad[3]:
        return [*of_qkv, None]
    share = torch.exp(sinks.to(total.dtype).unsqueeze(1) - total)
    products = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
    return [*of_qkv, -(share * products.T).sum(1).to(sinks.dtype)]


@custom_op("qfsdp::attend_with_sinks")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    cu_keys: Tensor | None,
    max_len: int,
    max_keys: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The result `[tokens, heads, head_dim]` and `total` `[heads, tokens]`, fp32 (or fp64).

    Args:
        cu_keys: as `cu_seqlens`, among the keys. A document's queries are then its last tokens.
            None: documents have as many keys as queries.
        max_len, max_keys: upper bounds of a document's queries and keys.
    """
    if has_kernel(q):
        cu_keys = cu_seqlens if cu_keys is None else cu_keys
        out, total, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, cu_seqlens, cu_keys, max_len, max_keys, 0.0, True, False),
            **_options(window, scale),
        )
        out = out.contiguous()  # the kernel gives it the layout of q
        if sinks is None:
            return out, total
        of_tokens, total = total, torch.logaddexp(total, sinks.to(total.dtype).unsqueeze(1))
        return out.mul_((of_tokens - total).exp().T.unsqueeze(-1).to(out.dtype)), total
    exact = _exact(q)
    out, total = q.new_empty(q.shape), q.new_empty(q.shape[1::-1], dtype=exact)
    for document in _documents(cu_seqlens, cu_keys, len(q)):
        for queries, keys in _blocks(*document, window):
            scores = _scores(q, k, queries, keys, window, scale)
            whole = scores.logsumexp(-1)
            if sinks is not None:
                whole = torch.logaddexp(whole, sinks.to(exact).view(*scores.shape[:2], 1))
            y = _grouped_product(scores.sub_(whole.unsqueeze(-1)).exp_(), v[keys])
            out[queries], total[:, queries] = y.to(q.dtype), whole.flatten(0, 1)
    return out, total


@custom_op("qfsdp::attend_with_sinks_backward")
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    total: Tensor,
    cu_keys: Tensor | None,
    max_len: int,
    max_keys: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if has_kernel(q):
        cu_keys = cu_seqlens if cu_keys is None else cu_keys
        unused = q.new_empty(2, dtype=torch.uint64)  # of random numbers for dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, total, cu_seqlens, cu_keys, max_len, max_keys, 0.0, True),
            *(unused, q.new_empty(0)),
            **_options(window, scale),
        )
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    exact = _exact(q)
    dq, dk, dv = (t.new_zeros(t.shape, dtype=exact) for t in (q, k, v))
    for document in _documents(cu_seqlens, cu_keys, len(q)):
        for queries, keys in _blocks(*document, window):
            p = _scores(q, k, queries, keys, window, scale)
            p = p.sub_(total[:, queries].view(*p.shape[:3], 1)).exp_()
            g, of_values = _by_group(grad[queries], k), v[keys].to(exact).transpose(0, 1)
            products = (g * _by_group(out[queries], k)).sum(-1, keepdim=True)
            ds = torch.matmul(g.flatten(1, 2), of_values.mT).view(p.shape).sub_(products).mul_(p)
            ds = ds.mul_(scale)
            dq[queries] = _grouped_product(ds, k[keys])
            of_queries = _by_group(q[queries], k).flatten(1, 2)
            dk[keys] += (ds.flatten(1, 2).mT @ of_queries).transpose(0, 1)
            dv[keys] += (p.flatten(1, 2).mT @ g.flatten(1, 2)).transpose(0, 1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@torch.library.register_fake("qfsdp::attend_with_sinks")
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1::-1], dtype=_exact(q))


@torch.library.register_fake("qfsdp::attend_with_sinks_backward")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- FlashAttention's kernels -------------------------------------------------------------------


def has_kernel(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and has_varlen(q.shape[-1])


def _options(window: int | None, scale: float) -> dict[str, Any]:
    before = -1 if window is None else window - 1
    return {"scale": scale, "window_size_left": before, "window_size_right": 0}


# ---- one block of queries after the other -------------------------------------------------------


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _documents(
    cu_seqlens: Tensor, cu_keys: Tensor | None, tokens: int
) -> Iterator[tuple[slice, slice]]:
    """The queries and keys of each document that has queries."""
    if cu_keys is None:
        yield from ((document, document) for document in documents(cu_seqlens, tokens))
        return
    both = zip(pairwise(cu_seqlens.tolist()), pairwise(cu_keys.tolist()), strict=True)
    yield from ((slice(a, b), slice(c, d)) for (a, b), (c, d) in both if a < b)


def _blocks(queries: slice, keys: slice, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of a document's queries, and the keys that they may see: up to the last query's."""
    shift = keys.stop - queries.stop
    for start in range(queries.start, queries.stop, BLOCK):
        stop = min(start + BLOCK, queries.stop)
        first = keys.start if window is None else max(keys.start, start + shift - window + 1)
        yield slice(start, stop), slice(first, stop + shift)


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """`[tokens, heads, head_dim]` -> `[kv_heads, group, tokens, head_dim]` in fp32 (or fp64)."""
    return x.to(_exact(x)).unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3).contiguous()


def _scores(
    q: Tensor, k: Tensor, queries: slice, keys: slice, window: int | None, scale: float
) -> Tensor:
    """`[kv_heads, group, queries, keys]`, -inf where a query does not see a key."""
    of_queries = _by_group(q[queries], k)
    of_keys = k[keys].to(of_queries.dtype).transpose(0, 1)
    scores = of_queries.flatten(1, 2) @ of_keys.mT
    scores = scores.unflatten(1, of_queries.shape[1:3]).mul_(scale)
    first = keys.stop - (queries.stop - queries.start)  # the first query's own key
    at = torch.arange(first, keys.stop, device=q.device).unsqueeze(1)
    seen = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
    return scores.masked_fill_(hidden, -torch.inf)


def _grouped_product(p: Tensor, x: Tensor) -> Tensor:
    """`[kv_heads, group, queries, keys]` times `[keys, kv_heads, head_dim]`: `[queries, heads,
    head_dim]`."""
    y = (p.flatten(1, 2) @ x.to(p.dtype).transpose(0, 1)).unflatten(1, p.shape[1:3])
    return y.permute(2, 0, 1, 3).flatten(1, 2)
