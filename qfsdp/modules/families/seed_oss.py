"""Seed-OSS: Llama with biases of queries, keys and values. Its dropout is not computed."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, MLPConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=524288,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
    )
    keys.only("hidden_act", "silu")
    return DecoderParts(
        **keys.sizes(),
        layers=keys.same_layers(),
        norm=keys.norm(),
        attention=AttentionConfig(
            qkv_bias=keys.switch("attention_bias"), o_bias=keys.switch("attention_out_bias")
        ),
        mlp=MLPConfig(bias=keys.switch("mlp_bias")),
    )
