"""Qwen 2 and 2.5 (arXiv:2407.10671): Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=32768,
        num_key_value_heads=32,
        sliding_window=4096,
        max_window_layers=28,
    )
    keys.only("hidden_act", "silu")
    return DecoderParts(
        **keys.sizes(),
        layers=layers(keys),
        norm=keys.norm(),
        attention=AttentionConfig(qkv_bias=True),
    )


def layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Qwen's layers: the first `max_window_layers` attend to everything, the others have the
    window, where it is switched on."""
    if not keys.switch("use_sliding_window"):
        return keys.same_layers()
    first, rope = keys.given("max_window_layers"), keys.rope()
    if type(first) is not int or first < 0:
        raise keys.error("max_window_layers", first, "an integer of at least 0")
    windows = keys.windows(lambda index: index >= first)
    return tuple(LayerConfig(window, rope) for window in windows)
