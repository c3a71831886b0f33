"""Gemma 3, text (arXiv:2503.19786): norms on both sides, GeGLU, and five layers with a sliding
window and their own rotary base for each layer without."""

from __future__ import annotations

import math
from typing import Any

from qfsdp.modules.decoder_parts import (
    AttentionConfig,
    DecoderParts,
    LayerConfig,
    LayerNorms,
    MLPConfig,
    Multipliers,
)
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=131072,
        num_key_value_heads=4,
        head_dim=256,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        sliding_window=4096,
        tie_word_embeddings=True,
    )
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("use_bidirectional_attention", False)
    keys.only("attn_logit_softcapping", None)
    keys.only("final_logit_softcapping", None)
    bias, sizes = keys.switch("attention_bias"), keys.sizes()
    return DecoderParts(
        **sizes,
        layers=_layers(keys),
        norm=keys.norm(rounds_once=True, offset=1.0),
        norms=LayerNorms(
            before_attention="input_layernorm",
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        attention=AttentionConfig(
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        ),
        mlp=MLPConfig(activation="gelu_tanh"),
        multipliers=Multipliers(math.sqrt(sizes["hidden_size"]), rounds_embedding=True),
    )


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    sliding, full = keys.two_ropes(keys.number("rope_local_base_freq"))
    every = keys.size("sliding_window_pattern", 6)
    windows = keys.windows(lambda index: (index + 1) % every != 0)
    return tuple(LayerConfig(window, sliding if window else full) for window in windows)
