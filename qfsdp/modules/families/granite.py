"""Granite 3 (dense): Llama with fixed factors of embedding, attention, residual and logits."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, MLPConfig, Multipliers
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(config, source, max_position_embeddings=2048)
    return DecoderParts(
        **keys.sizes(),
        **parts(keys),
        layers=keys.same_layers(),
        mlp=MLPConfig(bias=keys.switch("mlp_bias")),
    )


def parts(keys: Keys) -> dict[str, Any]:
    """What Granite 3 and 4 share."""
    keys.only("hidden_act", "silu")
    bias = keys.switch("attention_bias")
    return {
        "norm": keys.norm(),
        "attention": AttentionConfig(
            qkv_bias=bias, o_bias=bias, scale=keys.number("attention_multiplier", 1.0)
        ),
        "multipliers": Multipliers(
            embedding=keys.number("embedding_multiplier", 1.0),
            residual=keys.number("residual_multiplier", 1.0),
            logits=1.0 / keys.number("logits_scaling", 1.0),
        ),
    }
