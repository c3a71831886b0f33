"""Qwen3-MoE (arXiv:2505.09388): Qwen 3 with mixtures of experts in place of feed-forwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=32768,
        intermediate_size=6144,
        num_key_value_heads=4,
        sliding_window=4096,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        router_aux_loss_coef=0.001,
    )
    keys.only("hidden_act", "silu")
    bias = keys.switch("attention_bias")
    window = keys.window() if keys.switch("use_sliding_window") else None
    return DecoderParts(
        **keys.sizes(),
        layers=mixtures(keys, keys.same_layers(window)),
        norm=keys.norm(),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="head"),
        experts=keys.experts(normalised=keys.switch("norm_topk_prob")),
    )


def mixtures(keys: Keys, layers: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Every `decoder_sparse_step`-th layer is a mixture, except those of `mlp_only_layers`."""
    dense, step = keys.given("mlp_only_layers") or [], keys.size("decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise keys.error("mlp_only_layers", dense, "a list of indices of layers")
    return tuple(
        replace(layer, mixture=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(layers)
    )
