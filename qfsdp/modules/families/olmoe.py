"""OLMoE (arXiv:2409.02060): norms of whole projections, and a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        intermediate_size=2048,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        num_experts=64,
        num_experts_per_tok=8,
        router_aux_loss_coef=0.01,
    )
    keys.only("hidden_act", "silu")
    keys.only("clip_qkv", None)
    bias = keys.switch("attention_bias")
    return DecoderParts(
        **keys.sizes(),
        layers=keys.mixtures(keys.same_layers()),
        norm=keys.norm(),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="projection"),
        experts=keys.experts("intermediate_size", normalised=keys.switch("norm_topk_prob")),
    )
