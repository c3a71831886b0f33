"""Qwen2-MoE (arXiv:2407.10671) and Qwen1.5-MoE: Qwen 2 with mixtures of experts, and an expert with
a gate that all tokens share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerConfig, SharedExpert
from qfsdp.modules.families import qwen3_moe
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        intermediate_size=5632,
        max_position_embeddings=32768,
        num_key_value_heads=16,
        sliding_window=4096,
        max_window_layers=28,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
        router_aux_loss_coef=0.001,
    )
    keys.only("hidden_act", "silu")
    size = keys.size("shared_expert_intermediate_size")
    experts = keys.experts(normalised=keys.switch("norm_topk_prob"))
    return DecoderParts(
        **keys.sizes(),
        layers=qwen3_moe.mixtures(keys, layers(keys)),
        norm=keys.norm(),
        attention=AttentionConfig(qkv_bias=keys.switch("qkv_bias", True)),
        experts=replace(experts, shared=SharedExpert("shared_expert", size, "shared_expert_gate")),
    )


def layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """With `use_sliding_window`, every other one of the first `max_window_layers` has a window."""
    if not keys.switch("use_sliding_window"):
        return keys.same_layers()
    last, rope = keys.given("max_window_layers"), keys.rope()
    if type(last) is not int or last < 0:
        raise keys.error("max_window_layers", last, "an integer of at least 0")
    windows = keys.windows(lambda index: index % 2 == 0 and index < last)
    return tuple(LayerConfig(window, rope) for window in windows)
