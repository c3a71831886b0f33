"""Attention of rows that are not plain: cached, packed, cut, with shared prompts or with sinks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from qfsdp.data.cut_rows import CutRows
from qfsdp.data.preferences.shared_prompts import SharedDocuments
from qfsdp.modules.attention.cut_rows import attend_cut_rows
from qfsdp.modules.attention.document_lengths import Documents
from qfsdp.modules.attention.documents import attend_documents
from qfsdp.modules.attention.kv_cache import LayerCache
from qfsdp.modules.attention.shared_prompts import attend_shared
from qfsdp.modules.attention.sinks import attend_cached_with_sinks, attend_with_sinks


def attend_otherwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Documents,
    cache: LayerCache | None,
    sinks: Tensor | None,
    window: int | None,
    scale: float | None,
    group: str,
) -> Tensor:
    """`[batch, heads, seq, head_dim]`, as q. The last four are fields of `Attention`."""
    seq = q.shape[2]
    if cache is not None and cache.slots is not None:
        assert mask is not None
        if sinks is None:
            return attend_cached(q, cache.keys, cache.values, mask, scale)
        return attend_cached_with_sinks(q, cache.keys, cache.values, sinks, mask, scale)
    if isinstance(cu_seqlens, CutRows):
        return attend_cut_rows(q, k, v, sinks, cu_seqlens, window, scale, group)
    if isinstance(cu_seqlens, SharedDocuments):
        return attend_shared(q, k, v, sinks, cu_seqlens, seq, window, scale)
    if sinks is not None:
        return attend_with_sinks(q, k, v, sinks, cu_seqlens, seq, window, scale)
    assert cu_seqlens is not None
    return attend_documents(q, k, v, cu_seqlens, seq, window, scale)


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Grouped-query attention of one new token per row to the row's cached keys and values.

    `q` is `[batch, heads, 1, head_dim]`, `k` and `v` are `[batch, kv_heads, slots, head_dim]`.
    `mask` is bool `[batch, 1, 1, seen]` with `seen <= slots` (True: attend). Returns q's shape.
    """
    # The heads of a group are handled as queries of one head: nothing of the cache is expanded.
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    seen = mask.shape[3]
    keys, values = k[:, :, :seen], v[:, :, :seen]
    y = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
    return y.reshape(q.shape)
