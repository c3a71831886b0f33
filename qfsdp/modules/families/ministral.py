"""Ministral (2410): Mistral with a sliding window in some layers."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import DecoderParts, LayerConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        sliding_window=4096,
    )
    keys.only("hidden_act", "silu")
    rope, windows = keys.rope(), keys.windows(lambda index: True)
    layers = tuple(LayerConfig(window, rope) for window in windows)
    return DecoderParts(**keys.sizes(), layers=layers, norm=keys.norm())
