"""Granite 4 without experts and Mamba layers (GraniteMoeHybrid), as in its 350M and 1B models."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import DecoderParts, LayerConfig, MLPConfig
from qfsdp.modules.families import granite
from qfsdp.modules.families.keys import FULL, Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config | {"intermediate_size": config.get("shared_intermediate_size", 1024)},
        source,
        max_position_embeddings=2048,
    )
    keys.only("num_local_experts", 0, absent=8)
    for name in ("layer_types", "layers_block_type"):
        keys.of_layers(name, ("attention", FULL))
    if keys.given("layer_types") is None and keys.given("layers_block_type") is None:
        raise keys.error("layer_types", None, f"{FULL} for every layer")  # null: all are Mamba
    embedded = keys.given("position_embedding_type")
    if embedded not in (None, "rope"):
        raise keys.error("position_embedding_type", embedded, "'rope' or null")
    layer = LayerConfig(rope=keys.rope() if embedded else None)
    return DecoderParts(
        **keys.sizes(),
        **granite.parts(keys),
        layers=(layer,) * keys.size("num_hidden_layers"),
        mlp=MLPConfig("shared_mlp", ("input_linear",), "output_linear"),
    )
