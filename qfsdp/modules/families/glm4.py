"""GLM-4-0414 (dense): norms on both sides, and rotary pairs of neighbours in half of every head."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerNorms, MLPConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=131072,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-07,
        partial_rotary_factor=0.5,
        attention_bias=True,
    )
    keys.only("hidden_act", "silu")
    return DecoderParts(
        **keys.sizes(),
        layers=keys.same_layers(interleaved=True, shares=True),
        norm=keys.norm(),
        norms=LayerNorms(
            before_attention="input_layernorm",
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        attention=AttentionConfig(qkv_bias=keys.switch("attention_bias")),
        mlp=MLPConfig(inner=("gate_up_proj",)),
    )
