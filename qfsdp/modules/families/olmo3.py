"""OLMo 3 (arXiv:2512.13961): OLMo 2 with a sliding window in three of four layers. Only the others
are stretched for long contexts."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import DecoderParts, LayerConfig
from qfsdp.modules.families import olmo2
from qfsdp.modules.families.keys import Keys
from qfsdp.modules.families.rope_keys import NEW, SLIDING

THETA = 500000.0


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=THETA,
        sliding_window=4096,
    )
    sliding, full = keys.two_ropes(_sliding_theta(keys))
    windows = keys.windows(lambda index: (index + 1) % 4 != 0)
    layers = tuple(LayerConfig(window, sliding if window else full) for window in windows)
    return DecoderParts(**keys.sizes(), **olmo2.parts(keys), layers=layers)


def _sliding_theta(keys: Keys) -> float:
    """The base of layers with a window that `rope_parameters` gives none."""
    theta, objects = keys.given("rope_theta"), keys.object(NEW)
    if theta != THETA and "rope_theta" not in (objects.get(SLIDING) or {}):
        # transformers 4 read it for all layers, 5 reads it for those without a window.
        raise keys.error("rope_theta", theta, f"{THETA}, or {NEW} with a base for each layer type")
    return THETA
