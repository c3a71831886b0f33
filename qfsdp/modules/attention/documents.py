"""Attention within the documents that are packed into rows.

A packed row holds several samples, one after the other. Each token attends to its own document
only: the cost grows with the square of a document's length, and no mask over the row is needed.
GPUs use FlashAttention's kernel for sequences of different lengths (arXiv:2307.08691). Elsewhere
one document after the other goes through `scaled_dot_product_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.tensor_subclasses.kernels.ability import constant_when_compiled
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op


def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Grouped-query attention, causal within each document and blind to all others.

    Args:
        q: `[batch, heads, seq, head_dim]`, floating point.
        k, v: the same with `kv_heads` heads, a divisor of `heads`.
        cu_seqlens: int32 `[documents + 1]`, where documents start and end among the
            `batch * seq` tokens: from 0 to that number, never falling. Documents without tokens
            (repeated ends) are skipped.
        max_len: an upper bound of the documents' lengths. It is a constant of a compiled graph:
            give one that does not change from batch to batch.
        window: how many positions a token sees, itself included; None for all before it.
        scale: multiplies the scores; None: 1 / sqrt(head_dim).

    Returns:
        q's shape and dtype.

    Raises:
        ValueError: `cu_seqlens` does not go from 0 to `batch * seq`. Not checked on GPUs in fp16
            and bf16, where the check would wait for the GPU.
    """
    if window is not None and window >= max_len:
        window = None
    batch, _, seq, head_dim = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and has_varlen(head_dim):
        out = _varlen(q, k, v, cu_seqlens, max_len, window, scale)
    else:
        out = _AttendEach.apply(q, k, v, cu_seqlens, window, scale)
    return out.unflatten(0, (batch, seq)).transpose(1, 2)


# ---- FlashAttention's kernel for sequences of different lengths ---------------------------------


@constant_when_compiled
def has_varlen(head_dim: int) -> bool:
    """Whether FlashAttention supports this GPU and head size."""
    return is_varlen_size(head_dim) and torch.cuda.get_device_capability() >= (8, 0)


def is_varlen_size(head_dim: int) -> bool:
    """Whether FlashAttention supports heads of this size."""
    return head_dim % 8 == 0 and head_dim <= 256


@constant_when_compiled
def _varlen_is_told_of_groups() -> bool:
    """Whether `varlen_attn` wants to know of fewer k/v heads than q heads. That of torch 2.11 has
    no such argument and hands them to the same kernel, which takes them."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """`attend_each` by `varlen_attn`; `[tokens, heads, head_dim]`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if scale is not None:
        options["scale"] = scale
    if q.shape[1] != k.shape[1] and _varlen_is_told_of_groups():
        options["enable_gqa"] = True
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, **options)
    return cast(Tensor, out)


# ---- one document after the other ---------------------------------------------------------------
# Forward and backward are custom ops, so that torch.compile neither breaks its graph at the loop
# nor builds one for every list of lengths. Backward runs each document's attention again.


@custom_op("qfsdp::attend_documents")
def attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """`[tokens, heads, head_dim]`, as q; k and v may have fewer heads."""
    out = q.new_empty(q.shape)
    for document in documents(cu_seqlens, len(q)):
        out[document] = _attend_one(q[document], k[document], v[document], window, scale)
    return out


@custom_op("qfsdp::attend_documents_backward")
def attend_each_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grads = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    for document in documents(cu_seqlens, len(q)):
        q1, k1, v1 = (t[document].detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad(), autograd_on():
            out = _attend_one(q1, k1, v1, window, scale)
        parts = torch.autograd.grad(out, (q1, k1, v1), grad[document])
        for whole, part in zip(grads, parts, strict=True):
            whole[document] = part
    return grads


def autograd_on() -> Any:
    """Lets autograd record within an op, also where a dispatch mode has turned it off around it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded - autograd)


def documents(cu_seqlens: Tensor, tokens: int) -> Iterator[slice]:
    """The tokens of each document that has some. Raises `ValueError`, see `attend_documents`."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(f"cu_seqlens: {ends[0]} to {ends[-1]}; expected 0 to {tokens}")
    return (slice(a, b) for a, b in zip(ends, ends[1:], strict=False) if a < b)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None) -> Tensor:
    """Attention of one document, `[len, heads, head_dim]`."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    share = q.device.type == "cpu"  # only the CPU's flash kernel shares heads in every dtype
    if not share:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    mask, length = None, q.shape[2]
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, enable_gqa=share, scale=scale
    )
    return y[0].transpose(0, 1)


@torch.library.register_fake("qfsdp::attend_documents")
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("qfsdp::attend_documents_backward")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _AttendEach(torch.autograd.Function):
    """Attention `[tokens, heads, head_dim]`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        ctx.window, ctx.scale = window, scale
        ctx.save_for_backward(q, k, v, cu_seqlens)
        return attend_each(q, k, v, cu_seqlens, window, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = attend_each_backward(grad, *ctx.saved_tensors, ctx.window, ctx.scale)
        return *grads, None, None, None
