"""The decoder that every recipe trains: Llama, Mistral and Qwen from a Hugging Face `config.json`.

Modules are named as Hugging Face names them and rotary embeddings use its rotate-half layout, so
checkpoint keys are parameter names and no weight is ever renamed or permuted. The architectures
differ in a few switches only (biases, q/k norm, sliding window, rope scaling); one class has them.

Papers: Llama 2 (arXiv:2307.09288), RoPE (2104.09864), RMSNorm (1910.07467), GQA (2305.13245),
Mistral's sliding window (2310.06825).
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qfsdp.modules.activations import (
    ActivationConfig,
    Checkpointing,
    Offload,
    Unsummed,
    checkpointed,
    kept_as_sum,
)
from qfsdp.modules.attention import attend, attend_cached, attend_documents
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.kv_cache import KVCache, LayerCache
from qfsdp.modules.loss import head_loss
from qfsdp.modules.quantized_linear import linear


class Linear(nn.Linear):
    """`nn.Linear` that multiplies in the `product_dtype` of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in fp32 whatever the input's dtype.

    The normalised value is rounded to the input's dtype *before* the weight multiplies it, as
    Hugging Face does; `F.rms_norm(x, ..., weight)` rounds once, after, and bf16 logits differ.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight


class _Rotate(torch.autograd.Function):
    """Rotates the pairs (x[i], x[i + head_dim / 2]) of `[batch, seq, heads, head_dim]`.

    `sin` has its first half negated, see `_rotary_tables`. Written out, as the gradient is the
    rotation back: autograd's own of an index adds values up into zeros, one by one, which compiled
    code for GPUs does by atomics (1.3 G of them in a step of 8,192 tokens through Llama-3-8B).
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
        # An index, and no `cat`: that the compiler would not compute again in backward, and keep.
        order = 1 - torch.arange(2, device=x.device)
        return x.unflatten(-1, (2, -1))[..., order, :].flatten(-2)
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        c = config
        self.head_dim, self.window = c.head_dim, window
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, q_size, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, kv_size, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, kv_size, bias=c.qkv_bias)
        self.o_proj = Linear(q_size, c.hidden_size, bias=c.o_bias)
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


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, intermediate, bias=bias)
        self.up_proj = Linear(hidden, intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _mark_lengths(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Tells the compiler which sizes vary: left to find out, it builds everything twice, at the
    first batch and again at the first of another length (20 s each for SmolLM2 on a CPU)."""
    if cu_seqlens is not None:  # rows of packs have one length, their number of documents varies
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        return
    for tensor in (x, cos, sin):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    if mask is not None:
        torch._dynamo.maybe_mark_dynamic(mask, [2, 3])


Residual = Tensor | Unsummed


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual.

    `block` is the computation, which `compile_block` compiles. `windowed` says whether the model's
    sliding window holds in this layer. `unsummed` has it hand on its input and what it adds to it
    `Unsummed`, for the next layer to sum: see `Decoder.compile_layers`.
    """

    def __init__(self, config: DecoderConfig, windowed: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.sliding_window if windowed else None)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.windowed = windowed
        self.checkpointing: Checkpointing = "none"
        self.offload: Offload | None = None
        self.compiled = False
        self.unsummed = False

    def compile_block(self) -> None:
        """`torch.compile` the computation; what FSDP2 hooks onto the layer stays outside of it."""
        if self.keeps_branches:
            self.branches = torch.compile(self.branches)  # type: ignore[method-assign]
        else:
            self.block = torch.compile(self.block)  # type: ignore[method-assign]
        self.compiled = True

    @property
    def keeps_branches(self) -> bool:
        """Whether backward needs what attention and feed-forward gave, as DoRA's does."""
        last = (self.self_attn.o_proj, self.mlp.down_proj)
        return all(getattr(linear, "keeps_output", False) for linear in last)

    @property
    def recomputed(self) -> Checkpointing:
        """What is done again in backward; the compiler sees to "selective" itself."""
        selective = self.checkpointing == "selective"
        return "none" if self.compiled and selective else self.checkpointing

    def block(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        attention, feed_forward = self.branches(x, cos, sin, mask, cu_seqlens, cache)
        return x + attention + feed_forward

    def branches(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What attention adds to the residual, and what the feed-forward does after it."""
        y = self.self_attn(self.input_layernorm(x), cos, sin, mask, cu_seqlens, cache)
        return y, self.mlp(self.post_attention_layernorm(x + y))

    def forward(
        self,
        x: Residual,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Residual:
        if isinstance(x, Unsummed):
            with kept_as_sum(x) as (total, again):
                y = DecoderLayer.forward(self, total, cos, sin, mask, cu_seqlens)
            return y._replace(x_again=again) if isinstance(y, Unsummed) else y
        if cache is not None:
            return self._cached_block(x, cos, sin, mask, cache)
        if self.compiled:  # here, as FSDP2 hands the layer other tensors than it was called with
            _mark_lengths(x, cos, sin, mask, cu_seqlens)
        args = (x, cos, sin, mask, cu_seqlens)
        if not torch.is_grad_enabled():
            return self.block(*args)
        if self.unsummed and self.offload is None and self.recomputed == "none":
            return Unsummed(x, *self.branches(*args))
        if self.offload is None:
            return checkpointed(self.block, self.recomputed, *args)
        with self.offload.layer((*self.parameters(), cos, sin)):
            return checkpointed(self.block, self.recomputed, *args)

    def _cached_block(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """Compiled, if anything is, for new tokens only: a prompt is one call, a build many."""
        if self.compiled and cache.slots is None:
            y, z = DecoderLayer.branches(self, x, cos, sin, mask, None, cache)
            return x + y + z
        if self.compiled:
            for tensor in (x, cos, sin, cache.slots):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            for tensor, dim in ((mask, 3), (cache.keys, 2), (cache.values, 2)):
                torch._dynamo.maybe_mark_dynamic(tensor, [0, dim])
        return self.block(x, cos, sin, mask, None, cache)


class Backbone(nn.Module):
    """What Hugging Face calls `model`: only a level of names, `Decoder.forward` runs its parts."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        window = config.sliding_window
        windowed = [
            window is not None and index >= config.max_window_layers
            for index in range(config.num_hidden_layers)
        ]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, in_window) for in_window in windowed)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class OutputLayer(Linear):
    """Hidden states to logits `[..., vocab]`; given labels, to their summed cross entropy."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x) if labels is None else head_loss(self, x, labels)


class Decoder(nn.Module):
    """A causal language model whose parameters carry their Hugging Face names.

    Has no buffers: rotary tables are computed in every forward. With `tie_word_embeddings`,
    `lm_head.weight` *is* `model.embed_tokens.weight`; whatever replaces parameters (`to_empty`,
    `load_state_dict(assign=True)`) breaks that, and `tie_weights` restores it.

    `compute_dtype` is what trained weights are cast to where they are gathered; None: no cast.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.model = Backbone(config)
        self.lm_head = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output layer share the embedding's weight, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def set_activations(self, config: ActivationConfig) -> None:
        """What is kept of every layer for backward, and where."""
        offload = Offload() if config.offload else None
        for index, layer in enumerate(self.model.layers):
            layer = cast(DecoderLayer, layer)
            chosen = index % config.every_n_layers == 0
            layer.checkpointing = config.checkpointing if chosen else "none"
            layer.offload = offload

    def compile_layers(self) -> None:
        """`torch.compile` the computation of every layer; FSDP2's hooks stay outside of it.

        Two builds serve all layers and all lengths of batches: one for the first layer, whose input
        needs no gradient, and one for the others.
        """
        # Backward works pointwise results out again (norms, rotations, silu) instead of keeping
        # them: 731 MB kept instead of 1059 for 2048 tokens of SmolLM2, in 1 % more time.
        torch._functorch.config.ban_recompute_materialized_backward = False
        layers = [cast(DecoderLayer, layer) for layer in self.model.layers]
        for layer in layers:
            layer.compile_block()
        # What the branches of a layer give is kept for DoRA's magnitudes anyway. The next layer's
        # input then need not be kept: it is the sum of them and the input before. (The sum within
        # a layer compiled code works out again by itself.) Backward needs the inputs of such a row
        # of layers at once, so rows are as long as there are rows.
        row = max(2, math.isqrt(len(layers)))
        for index, layer in enumerate(layers[:-1], 1):
            layer.unsummed = layer.keeps_branches and index % row != 0

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits of the next token, `[batch, seq, vocab]` in the dtype of the weights; given
        `labels` (int64 `[batch, seq]`, -100 for none) their summed cross entropy instead, an fp32
        scalar, for which the logits never exist whole.

        `tokens` is int64 `[batch, seq]`; `positions` likewise (None: 0, 1, 2, ...). `mask` is bool
        `[batch, 1, seq, seq]`, True where a query (row) attends to a key, and must be causal
        itself. None is plain causal attention, which serves right-padded batches as well: padding
        comes after every real token, so none sees it; only the loss must ignore its logits.

        `cu_seqlens` (int32, see `attend_documents`) instead of a mask keeps apart the samples that
        are packed into a row; `positions` must then start at 0 in each. Raises ValueError where it
        comes with a mask or without positions.

        With a `cache`, and nothing else, `tokens` are added to it: in the first call prompts,
        padded on the right, then `[batch, 1]` one after another. Returns `[batch, vocab]`, the
        logits of the token after each row's last one. For inference only: no gradients.
        """
        if cache is not None:
            return self._next_logits(tokens, cache)
        if cu_seqlens is not None and (mask is not None or positions is None):
            raise ValueError("cu_seqlens takes positions with it, and no mask")
        x = self.model.embed_tokens(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        cos, sin = self._rotary_tables(positions, x.dtype)
        windowed_mask = self._within_window(mask, tokens) if cu_seqlens is None else None
        for layer in self.model.layers:
            seen = windowed_mask if layer.windowed else mask
            x = layer(x, cos, sin, seen, cu_seqlens)
        x = self.model.norm(x)
        return self.lm_head(x) if labels is None else self._loss(x, labels)

    def _next_logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        x = self.model.embed_tokens(tokens)
        rows, columns = (torch.arange(size, device=tokens.device) for size in tokens.shape)
        positions, last = columns.unsqueeze(0), cache.lengths - 1
        mask, windowed_mask = None, self._within_window(None, tokens)
        if cache.filled:
            positions, last = cache.lengths.unsqueeze(1), torch.zeros_like(rows)
            mask, windowed_mask = cache.mask(), cache.mask(self.config.sliding_window)
        cos, sin = self._rotary_tables(positions, x.dtype)
        for layer, kept in zip(self.model.layers, cache.layers(x.dtype), strict=True):
            x = layer(x, cos, sin, windowed_mask if layer.windowed else mask, None, kept)
        cache.advance()
        return self.lm_head(self.model.norm(x[rows, last]))

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head = self.lm_head
        if not isinstance(head, FSDPModule):
            return head_loss(head, hidden, labels)
        if isinstance(head, OutputLayer) and head.weight.requires_grad:
            # FSDP2 sees one call, and reduces and frees the gradient where backward begins.
            return head(hidden, labels)
        # Gathered by hand, as the loss calls it chunk by chunk; a frozen one is done with after
        # that, where FSDP2 would keep it until backward.
        head.unshard()
        loss = head_loss(head, hidden, labels)
        if not any(param.requires_grad for param in head.parameters()):
            head.reshard()
        return loss

    def _rotary_tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[batch or 1, seq, 1, head_dim]`, in fp32 until the final cast; the first
        half of sine is negated, for `_Rotate`."""
        inverse = self.config.rope.inverse_frequencies(self.config.head_dim, positions.device)
        angles = positions[:, :, None, None].float() * inverse
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _within_window(self, mask: Tensor | None, tokens: Tensor) -> Tensor | None:
        """`mask` narrowed to the sliding window; unchanged where the window hides nothing."""
        window, seq = self.config.sliding_window, tokens.shape[1]
        if window is None or seq <= window:
            return mask
        distance = torch.arange(seq, device=tokens.device)
        distance = distance[:, None] - distance
        near = ((distance >= 0) & (distance < window))[None, None]
        return near if mask is None else mask & near
