"""Llama 2 and 3 (arXiv:2307.09288, 2407.21783), Yi, SmolLM2."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, MLPConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(config, source, max_position_embeddings=2048)
    keys.only("hidden_act", "silu")
    bias = keys.switch("attention_bias")
    return DecoderParts(
        **keys.sizes(),
        layers=keys.same_layers(),
        norm=keys.norm(),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias),
        mlp=MLPConfig(bias=keys.switch("mlp_bias")),
    )
