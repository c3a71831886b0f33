"""gpt-oss (arXiv:2508.10925): a mixture in every layer, a window in every other one, attention with
sinks, and biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerConfig
from qfsdp.modules.families.keys import Keys
from qfsdp.modules.families.rope_keys import rope_object

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        intermediate_size=2880,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        sliding_window=128,
        num_experts=128,
        num_experts_per_tok=4,
        router_aux_loss_coef=0.001,
    )
    keys.only("hidden_act", "silu")
    bias, rope = keys.switch("attention_bias", True), keys.rope(rope=rope_object(keys, ROPE))
    windows = keys.windows(lambda index: index % 2 == 0)
    experts = keys.experts("intermediate_size", kind="chosen", bias=True, name="router")
    return DecoderParts(
        **keys.sizes(),
        layers=keys.mixtures(LayerConfig(window, rope) for window in windows),
        norm=keys.norm(rounds_once=True),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias, sinks=True),
        experts=replace(
            experts,
            bias=True,
            interleaved=True,
            transposed=True,
            clamp=(keys.number("swiglu_limit", 7.0), keys.number("swiglu_alpha", 1.702)),
        ),
    )
