"""Phi-3 (arXiv:2404.14219), Phi-4 and Phi-4-mini (text): one linear for queries, keys and values,
one for gate and up."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, LayerConfig, MLPConfig
from qfsdp.modules.families.keys import Keys
from qfsdp.modules.families.rope_keys import rope_object


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    keys.only("hidden_act", "silu")
    rope = rope_object(keys)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("su", "yarn"):  # LongRoPE's earlier names
        rope = rope | {"rope_type": "longrope"}
    elif kind not in ("default", "longrope"):
        raise keys.error("rope_type", kind, "longrope, su, yarn or default")
    layer = LayerConfig(keys.window(), keys.rope(rope=rope, shares=True))
    return DecoderParts(
        **keys.sizes(),
        layers=(layer,) * keys.size("num_hidden_layers"),
        norm=keys.norm(),
        attention=AttentionConfig(("qkv_proj",)),
        mlp=MLPConfig(inner=("gate_up_proj",)),
    )
