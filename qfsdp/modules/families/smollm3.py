"""SmolLM3: Llama in which every fourth layer has no rotary embedding (arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerConfig, MLPConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=32768,
        num_key_value_heads=4,
        rope_theta=2000000.0,
        tie_word_embeddings=True,
    )
    keys.only("hidden_act", "silu")
    bias = keys.switch("attention_bias")
    return DecoderParts(
        **keys.sizes(),
        layers=_layers(keys),
        norm=keys.norm(),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias),
        mlp=MLPConfig(bias=keys.switch("mlp_bias")),
    )


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """1 in `no_rope_layers` says that a layer has a rotary embedding."""
    every, rope = keys.size("no_rope_layer_interval", 4), keys.rope()
    has_rope = keys.of_layers("no_rope_layers", (0, 1))
    if has_rope is None:
        has_rope = [(index + 1) % every != 0 for index in range(keys.size("num_hidden_layers"))]
    has_window = keys.switch("use_sliding_window")
    windows = keys.windows(lambda index: has_window and not has_rope[index])
    return tuple(
        LayerConfig(window, rope if rotated else None)
        for window, rotated in zip(windows, has_rope, strict=True)
    )
