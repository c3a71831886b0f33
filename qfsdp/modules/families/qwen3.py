"""Qwen 3 (arXiv:2505.09388): Llama with norms of every head's queries and keys."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts
from qfsdp.modules.families import qwen2
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=32768,
        num_key_value_heads=32,
        head_dim=128,
        sliding_window=4096,
        max_window_layers=28,
    )
    keys.only("hidden_act", "silu")
    bias = keys.switch("attention_bias")
    return DecoderParts(
        **keys.sizes(),
        layers=qwen2.layers(keys),
        norm=keys.norm(),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="head"),
    )
