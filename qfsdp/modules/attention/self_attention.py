"""Self-attention: projections, norms, rotary positions, and the attention of a batch's rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.modules.attention.document_lengths import Documents
from qfsdp.modules.attention.kv_cache import LayerCache
from qfsdp.modules.attention.otherwise import attend_otherwise
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import LayerConfig
from qfsdp.modules.low_rank.linear import outputs
from qfsdp.modules.rope import kept_unrotated, rotate
from qfsdp.tensor_subclasses.kernels.ability import constant_when_compiled


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv:2104.09864) and grouped key/value heads
    (arXiv:2305.13245).

    Fields:
        inner: names of the linears that make queries, keys and values.
        widths: numbers of a token's queries, keys and values.
        window: how many positions a token sees; None for all before it.
        gated: see `AttentionConfig`; gates follow the queries of each head.
        sinks: `[heads]`, a logit of each head that no token stands for, or None.
        group: name of the ranks that share rows (`sharding.context_parallel`); "": none do.
        keeps_all: nothing is computed again in backward or moved to host memory.
    """

    def __init__(self, config: DecoderConfig, layer: LayerConfig) -> None:
        super().__init__()
        c, part = config, config.attention
        self.head_dim, self.window, self.scale = c.head_dim, layer.window, part.scale
        self.inner, self.gated, self.group = part.inner, part.gated, ""
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.widths = (q_size, kv_size, kv_size)
        q_and_gate = q_size * (1 + self.gated)
        sizes = (q_and_gate, kv_size, kv_size) if len(self.inner) == 3 else (sum(self.widths),)
        for name, size in zip(self.inner, sizes, strict=True):
            setattr(self, name, nn.Linear(c.hidden_size, size, bias=part.qkv_bias))
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=part.o_bias)
        of_heads = part.qk_norm != "projection"
        self.normed = (c.head_dim, c.head_dim) if of_heads else (q_size, kv_size)
        no_norm = part.qk_norm is None
        self.q_norm = nn.Identity() if no_norm else c.norm.build(self.normed[0])
        self.k_norm = nn.Identity() if no_norm else c.norm.build(self.normed[1])
        self.sinks = nn.Parameter(torch.zeros(c.num_attention_heads)) if part.sinks else None
        self.keeps_all = False

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Documents,
        cache: LayerCache | None = None,
    ) -> Tensor:
        rows, heads = x.shape[:2], (*x.shape[:2], -1, self.head_dim)
        q, k, v = self._projections(x)
        if self.gated:
            q, gate = q.unflatten(2, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        q = self.q_norm(q.reshape(*rows, -1, self.normed[0])).view(heads)
        k = self.k_norm(k.view(*rows, -1, self.normed[1])).view(heads)
        kept: Any = nullcontext()
        if cos is not None and sin is not None:
            of_q = (q, cos[:, :, :1], sin[:, :, :1], self.interleaved)
            of_k = (k, cos[:, :, -1:], sin[:, :, -1:], self.interleaved)
            q, k = rotate(*of_q), rotate(*of_k)
            if self._is_unrotated_kept():
                kept = kept_unrotated((q, *of_q), (k, *of_k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v.view(heads)))
        if cache is not None:
            cache.put(k, v)
        cached = cache is not None and cache.slots is not None
        with kept:
            if cu_seqlens is None and self.sinks is None and not cached:
                y = attend(q, k, v, mask, self.scale)
            else:
                kind = (self.sinks, self.window, self.scale, self.group)
                y = attend_otherwise(q, k, v, mask, cu_seqlens, cache, *kind)
        y = y.transpose(1, 2)
        return self.o_proj((y * gate.sigmoid() if self.gated else y).flatten(2))

    def _is_unrotated_kept(self) -> bool:
        """Whether queries are kept unrotated anyway: the gradient of DoRA's magnitude takes them.
        Compilers find that by themselves. Asked for first, no build depends on `keeps_all`."""
        if torch.compiler.is_compiling() or not self.keeps_all or not torch.is_grad_enabled():
            return False
        makes_q: Any = getattr(self, self.inner[0])
        dora = getattr(makes_q, "magnitude", None) is not None
        return dora and makes_q.bias is None and isinstance(self.q_norm, nn.Identity)

    @property
    def outer(self) -> nn.Module:
        """The last linear."""
        return self.o_proj

    def _projections(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values `[batch, seq, width]`."""
        made = outputs(x, [getattr(self, name) for name in self.inner])
        return made if len(made) == 3 else made[0].split(self.widths, dim=-1)


@constant_when_compiled
def _is_old_gpu() -> bool:
    """Whether flash attention has no kernel for this GPU (V100, T4)."""
    return torch.cuda.get_device_capability() < (8, 0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Grouped-query attention, causal where `mask` is None.

    `q` is `[batch, heads, seq, head_dim]`, `k` and `v` have `kv_heads` of them (a divisor),
    `mask` is bool and broadcasts to `[batch, heads, seq, seq]` (True: attend). `scale`
    multiplies the scores; None: 1 / sqrt(head_dim). Returns q's shape.
    """
    # Sharing k/v inside the kernel took 77.1 ms, repeating them 78.9 and expanding them 77.7 in
    # bf16 (93.4, 105.8, 97.1 in fp32; 9/3 heads of 64, batch 4, seq 512, forward + backward on one
    # CPU core), always with flash attention. On CUDA, flash shares k/v but takes neither masks nor
    # fp32, and needs compute capability 8.0. The memory-efficient kernel takes all of that, but
    # cannot share k/v: asked to, PyTorch falls back to the math path with its seq x seq matrix. So
    # k/v are expanded in those three cases.
    share = mask is None and q.dtype != torch.float32 and not (q.is_cuda and _is_old_gpu())
    if not share and q.shape[1] != k.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, enable_gqa=share, scale=scale
    )


def within_window(mask: Tensor | None, window: int | None, tokens: Tensor) -> Tensor | None:
    """`mask` narrowed to a sliding window; unchanged where the window hides nothing."""
    seq = tokens.shape[1]
    if window is None or seq <= window:
        return mask
    distance = torch.arange(seq, device=tokens.device)
    distance = distance[:, None] - distance
    near = ((distance >= 0) & (distance < window))[None, None]
    return near if mask is None else mask & near
