"""OLMo 3 (arXiv:2512.13961): OLMo 2 with a sliding window in three of four layers. Only the others
are stretched for long contexts."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import DecoderParts, LayerConfig
from qfsdp.modules.families import olmo2
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        sliding_window=4096,
    )
    sliding, full = keys.two_ropes()
    windows = keys.windows(lambda index: (index + 1) % 4 != 0)
    layers = tuple(LayerConfig(window, sliding if window else full) for window in windows)
    return DecoderParts(**keys.sizes(), **olmo2.parts(keys), layers=layers)
