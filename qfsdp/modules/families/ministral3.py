"""Ministral 3, text (2512): Mistral with YaRN, and longer queries at far positions."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import DecoderParts, LayerConfig
from qfsdp.modules.families.keys import Keys
from qfsdp.modules.families.rope_keys import rope_object
from qfsdp.modules.families.values import Values
from qfsdp.modules.rope import QueryScaling

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=262144,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
    )
    keys.only("hidden_act", "silu")
    values = rope_object(keys, ROPE)
    rope, scaling = Values(values, source), None
    if rope.given("llama_4_scaling_beta") is not None:
        original = rope.size(
            "original_max_position_embeddings", keys.size("max_position_embeddings")
        )
        scaling = QueryScaling(rope.number("llama_4_scaling_beta"), original)
    layer = LayerConfig(keys.window(), keys.rope(rope=values, query_scaling=scaling))
    layers = (layer,) * keys.size("num_hidden_layers")
    return DecoderParts(**keys.sizes(), layers=layers, norm=keys.norm())
