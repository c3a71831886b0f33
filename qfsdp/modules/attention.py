"""Self-attention: projections, norms, rotary positions, and the attention of a batch's rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.document_attention import attend_documents
from qfsdp.modules.kv_cache import LayerCache


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) over the last dimension, computed in fp32.

    The normalised value is rounded to the input's dtype *before* the weight multiplies it, as in
    Hugging Face. `F.rms_norm(x, ..., weight)` rounds once, after it: bf16 logits would differ.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight


class _Rotate(torch.autograd.Function):
    """Rotates the pairs (x[i], x[i + head_dim / 2]) of `[batch, seq, heads, head_dim]`.

    The first half of `sin` is negated, see `Decoder._rotary_tables`. The gradient, the rotation
    back, is written out. Autograd's gradient of an index adds values into zeros one by one.
    Compiled code for GPUs uses atomics for it: 1.3 G in a step of 8,192 tokens of Llama-3-8B.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return x * cos + _swap_halves(x) * sin

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return grad * cos - _swap_halves(grad) * sin, None, None


def _swap_halves(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # The compiler keeps the result of `cat` for backward, but computes an index again.
        order = 1 - torch.arange(2, device=x.device)
        return x.unflatten(-1, (2, -1))[..., order, :].flatten(-2)
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv:2104.09864) and grouped key/value heads
    (arXiv:2305.13245). `window`: how many positions a token sees; None for all before it.
    """

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        c = config
        self.head_dim, self.window = c.head_dim, window
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q_size, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_size, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_size, bias=c.qkv_bias)
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = _Rotate.apply(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = _Rotate.apply(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, self.v_proj(x).view(heads)))
        if cache is not None:
            cache.put(k, v)
        if cache is not None and cache.slots is not None:
            assert mask is not None
            y = attend_cached(q, cache.keys, cache.values, mask)
        elif cu_seqlens is None:
            y = attend(q, k, v, mask)
        else:
            y = attend_documents(q, k, v, cu_seqlens, x.shape[1], self.window)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention, causal where `mask` is None.

    `q` is `[batch, heads, seq, head_dim]`, `k` and `v` have `kv_heads` of them (a divisor),
    `mask` is bool and broadcasts to `[batch, heads, seq, seq]` (True: attend). Returns q's shape.
    """
    # Sharing k/v inside the kernel took 77.1 ms, repeating them 78.9 and expanding them 77.7 in
    # bf16 (93.4, 105.8, 97.1 in fp32; 9/3 heads of 64, batch 4, seq 512, forward + backward on one
    # CPU core), always with flash attention. On CUDA, flash shares k/v but takes neither masks nor
    # fp32. The memory-efficient kernel takes both, but cannot share k/v: asked to, PyTorch falls
    # back to the math path with its seq x seq matrix. So k/v are expanded in those two cases.
    share = mask is None and q.dtype != torch.float32
    if not share and q.shape[1] != k.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=share)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of one new token per row to the row's cached keys and values.

    `q` is `[batch, heads, 1, head_dim]`, `k` and `v` are `[batch, kv_heads, slots, head_dim]`.
    `mask` is bool `[batch, 1, 1, seen]` with `seen <= slots` (True: attend). Returns q's shape.
    """
    # The heads of a group are handled as queries of one head: nothing of the cache is expanded.
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    seen = mask.shape[3]
    y = F.scaled_dot_product_attention(grouped, k[:, :, :seen], v[:, :, :seen], mask)
    return y.reshape(q.shape)
