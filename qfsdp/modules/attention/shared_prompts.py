"""Attention within packed documents some of whose tokens stand in the rows once.

Two answers to a prompt are two documents, see `qfsdp.data.preferences.shared_prompts`. Queries,
keys and values are written out for all documents, attention runs as always, and each token's own
result is taken. So any kernel serves. A prompt is attended to twice, and goes through the rest of a
layer once.

Forward and backward are custom ops: autograd keeps what stands in the rows, and backward writes out
again. Without that, the results that selective checkpointing keeps of Llama-3-8B took 1 GiB more
for a row of 4,096 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.data.preferences.shared_prompts import SharedDocuments
from qfsdp.modules.attention.documents import attend_documents, autograd_on
from qfsdp.modules.attention.sinks import attend_with_sinks
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op


def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: SharedDocuments,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attend_documents` or, with sinks, `attend_with_sinks`, over documents that share tokens.

    Args:
        q, k, v, max_len, window, scale: as of `attend_documents`.
        sinks: `[heads]`, logits, or None.

    Returns:
        q's shape and dtype.

    Raises:
        ValueError: as `attend_documents`.
    """
    batch, _, seq, _ = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = _AttendShared.apply(q, k, v, sinks, *documents, max_len, window, scale)
    return out.unflatten(0, (batch, seq)).transpose(1, 2)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    sources: Tensor,
    places: Tensor,
    *how: Any,
) -> Tensor:
    q, k, v = (t.index_select(0, sources).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    if sinks is None:
        y = attend_documents(q, k, v, cu_seqlens, *how)
    else:
        y = attend_with_sinks(q, k, v, sinks, cu_seqlens, *how)
    return y[0].transpose(0, 1).index_select(0, places)


@custom_op("qfsdp::attend_shared")
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    sources: Tensor,
    places: Tensor,
    max_len: int,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """`[tokens, heads, head_dim]`, as q; k and v may have fewer heads."""
    how = (cu_seqlens, sources, places, max_len, window, scale)
    return _written_out(q, k, v, sinks, *how).contiguous()


@custom_op("qfsdp::attend_shared_backward")
def attend_backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    sources: Tensor,
    places: Tensor,
    max_len: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks; the last is empty without sinks. No token is written out more
    than twice, so they are the same in every run, though they are added up in any order."""
    given = [t.detach().requires_grad_() for t in (q, k, v)]
    logits = None if sinks is None else sinks.detach().requires_grad_()
    how = (cu_seqlens, sources, places, max_len, window, scale)
    with torch.enable_grad(), autograd_on():
        y = _written_out(*given, logits, *how)
    wanted = given if logits is None else [*given, logits]
    grads = [part.contiguous() for part in torch.autograd.grad(y, wanted, grad)]
    return grads[0], grads[1], grads[2], grads[3] if logits is not None else q.new_empty(0)


@torch.library.register_fake("qfsdp::attend_shared")
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("qfsdp::attend_shared_backward")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


class _AttendShared(torch.autograd.Function):
    """Attention `[tokens, heads, head_dim]`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        sources: Tensor,
        places: Tensor,
        max_len: int,
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        ctx.how = max_len, window, scale
        ctx.save_for_backward(q, k, v, sinks, cu_seqlens, sources, places)
        return attend_op(q, k, v, sinks, cu_seqlens, sources, places, max_len, window, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *of_qkv, of_sinks = attend_backward_op(grad, *ctx.saved_tensors, *ctx.how)
        given = of_sinks if ctx.needs_input_grad[3] else None
        return *of_qkv, given, None, None, None, None, None, None
