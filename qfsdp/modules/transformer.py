"""The decoder that every recipe trains: Llama, Mistral and Qwen from a Hugging Face `config.json`.

Modules have the names that Hugging Face gives them, and rotary embeddings use its rotate-half
layout. So checkpoint keys are parameter names, and no weight is renamed or permuted. One class
serves all architectures: they differ in biases, q/k norms, sliding window and rope scaling only.

Papers: Llama 2 (arXiv:2307.09288), Mistral's sliding window (2310.06825).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qfsdp.modules.activations import ActivationConfig, Checkpointing, Offload, checkpointed
from qfsdp.modules.attention import Attention, RMSNorm
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.kv_cache import KVCache, LayerCache
from qfsdp.modules.loss import head_loss


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _mark_lengths(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Tells the compiler which sizes vary. Without it the compiler builds everything for the first
    batch, and again for the first batch of another length (20 s each for SmolLM2 on a CPU)."""
    if cu_seqlens is not None:  # packed rows have one length, but any number of documents
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        return
    for tensor in (x, cos, sin):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    if mask is not None:
        torch._dynamo.maybe_mark_dynamic(mask, [2, 3])


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual.

    `block` is the computation. `forward` adds what a run chooses around it: checkpointing and
    offloading of activations, and the cache of generation.

    Args:
        config: of the decoder.
        windowed: whether the model's sliding window applies to this layer.
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

    def compile_block(self) -> None:
        """Compiles `block`; FSDP2's hooks on the layer stay outside of the compiled code."""
        self.block = torch.compile(self.block)  # type: ignore[method-assign]
        self.compiled = True

    @property
    def recomputed(self) -> Checkpointing:
        """How `block` is checkpointed: the compiler does "selective" by itself."""
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
        y = self.self_attn(self.input_layernorm(x), cos, sin, mask, cu_seqlens, cache)
        z = self.mlp(self.post_attention_layernorm(x + y))
        # A second x + y. With a single one, backward adds the gradients of norm and residual in
        # another order, and fp32 runs differ from earlier ones in the last bits.
        return x + y + z

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        if cache is not None:
            return self._cached_block(x, cos, sin, mask, cache)
        if self.compiled:  # marked here: FSDP2's hooks pass other tensors than the caller's
            _mark_lengths(x, cos, sin, mask, cu_seqlens)
        args = (x, cos, sin, mask, cu_seqlens)
        if not torch.is_grad_enabled():
            return self.block(*args)
        if self.offload is None:
            return checkpointed(self.block, self.recomputed, *args)
        with self.offload.layer((*self.parameters(), cos, sin)):
            return checkpointed(self.block, self.recomputed, *args)

    def _cached_block(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """`block` with a cache. A prompt runs uncompiled: one call does not pay for a build."""
        if self.compiled and cache.slots is None:
            return DecoderLayer.block(self, x, cos, sin, mask, None, cache)
        if self.compiled:
            for tensor in (x, cos, sin, cache.slots):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            for tensor, dim in ((mask, 3), (cache.keys, 2), (cache.values, 2)):
                torch._dynamo.maybe_mark_dynamic(tensor, [0, dim])
        return self.block(x, cos, sin, mask, None, cache)


class Backbone(nn.Module):
    """Hugging Face's `model`: gives its parts their names. `Decoder.forward` runs them."""

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


class OutputLayer(nn.Linear):
    """Logits `[..., vocab]` of hidden states or, given labels, their summed cross entropy."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x) if labels is None else head_loss(self, x, labels)


class Decoder(nn.Module):
    """A causal language model whose parameters carry their Hugging Face names.

    It has no buffers: every forward computes the rotary tables. With `tie_word_embeddings`,
    `lm_head.weight` *is* `model.embed_tokens.weight`. Replacing parameters (`to_empty`,
    `load_state_dict(assign=True)`) breaks that; `tie_weights` restores it.

    Fields:
        compute_dtype: FSDP2 casts trained weights to it as it gathers them; None: no cast.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.model = Backbone(config)
        self.lm_head = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output layer share the embedding's weight if the config ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def set_activations(self, config: ActivationConfig) -> None:
        """Sets what each layer keeps for backward, and where."""
        offload = Offload() if config.offload else None
        for index, layer in enumerate(self.model.layers):
            layer = cast(DecoderLayer, layer)
            chosen = index % config.every_n_layers == 0
            layer.checkpointing = config.checkpointing if chosen else "none"
            layer.offload = offload

    def compile_layers(self) -> None:
        """Compiles the computation of every layer; FSDP2's hooks stay outside of it.

        Two builds serve all layers and all lengths of batches: one for the first layer, whose input
        needs no gradient, and one for the others.
        """
        # Backward computes pointwise results (norms, rotations, silu) again instead of keeping
        # them: 731 MB kept instead of 1059 for 2048 tokens of SmolLM2, in 1 % more time.
        torch._functorch.config.ban_recompute_materialized_backward = False
        for layer in self.model.layers:
            cast(DecoderLayer, layer).compile_block()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits, or with labels the loss.

        Args:
            tokens: int64 `[batch, seq]`. With a `cache`: prompts in the first call, padded on the
                right, then `[batch, 1]` in each later call.
            positions: int64 `[batch, seq]`; None: 0, 1, 2, ...
            mask: bool `[batch, 1, seq, seq]`, True where a query (row) attends to a key; it must
                be causal. None: causal attention. That serves right-padded batches too, as padding
                comes after every real token; the loss must ignore its logits.
            labels: int64 `[batch, seq]`, -100 for none.
            cu_seqlens: int32 bounds of the samples packed into rows, see `attend_documents`.
                `positions` must then start at 0 in each sample.
            cache: for generation, without gradients; only `tokens` may be given with it.

        Returns:
            `[batch, seq, vocab]` in the dtype of the weights. With `labels`: their summed cross
            entropy, an fp32 scalar; the logits never exist whole. With a `cache`: `[batch, vocab]`,
            the logits of the token after each row's last one.

        Raises:
            ValueError: `cu_seqlens` is given with a mask or without positions.
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
            # One call for FSDP2, which reduces and frees the gradient as backward begins.
            return head(hidden, labels)
        # Gathered by hand, as the loss calls it chunk by chunk. A frozen one is freed after that;
        # FSDP2 would keep it until backward.
        head.unshard()
        loss = head_loss(head, hidden, labels)
        if not any(param.requires_grad for param in head.parameters()):
            head.reshard()
        return loss

    def _rotary_tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, `[batch or 1, seq, 1, head_dim]` of `dtype`, computed in fp32. The first
        half of sine is negated, for `attention._Rotate`."""
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
