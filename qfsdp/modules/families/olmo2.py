"""OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward, and of whole projections."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerNorms
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(config, source, max_position_embeddings=2048, rms_norm_eps=1e-5)
    return DecoderParts(**keys.sizes(), **parts(keys), layers=keys.same_layers())


def parts(keys: Keys) -> dict[str, Any]:
    """What OLMo 2 and 3 share."""
    keys.only("hidden_act", "silu")
    bias = keys.switch("attention_bias")
    return {
        "norm": keys.norm(rounds_once=True),
        "norms": LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="projection"),
    }
