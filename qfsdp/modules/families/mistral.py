"""Mistral (arXiv:2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import DecoderParts
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
    return DecoderParts(**keys.sizes(), layers=keys.same_layers(keys.window()), norm=keys.norm())
