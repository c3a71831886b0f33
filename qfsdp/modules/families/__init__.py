"""Model families: how each `config.json` becomes the parts of a decoder.

A family is a function in `dense`, `mixtures` or `hybrid` that takes the keys of a `config.json` and
returns the parts in which its decoder differs from the usual one. The decoder knows no family.
Checkpoint keys are parameter names: a family names its modules where they differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import DecoderParts
from qfsdp.modules.families import dense, hybrid, mixtures
from qfsdp.modules.families.keys import FAMILIES

__all__ = ["FAMILIES", "architecture_of", "dense", "hybrid", "mixtures", "read"]


def architecture_of(config: dict[str, Any]) -> Any:
    """The first of the `architectures` of a parsed `config.json`, which should be text."""
    names = config.get("architectures") or [None]
    return names[0] if isinstance(names, list) else names


def read(config: dict[str, Any], source: str) -> DecoderParts:
    """The decoder that a parsed `config.json` describes. Raises `UserError`, which names `source`,
    for an architecture that is not in `FAMILIES` and for values that the family does not have or
    the decoder does not compute."""
    architecture = architecture_of(config)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        if config.get("kv_lora_rank") is not None:
            raise UserError(
                f"{source}: architecture {architecture!r} has latent attention (kv_lora_rank), "
                f"which is not computed; expected one of {known}"
            )
        if str(architecture).endswith("ForConditionalGeneration"):
            raise UserError(
                f"{source}: architecture {architecture!r} takes more than text; expected the text "
                f"model alone (docs/guide/faq.md writes it), one of {known}"
            )
        raise UserError(
            f"{source}: architecture {architecture!r} is unknown; expected one of {known}"
        )
    parts = FAMILIES[architecture](config, source)
    # Without a mixture among its layers it is a dense model.
    return parts if any(layer.mixture for layer in parts.layers) else replace(parts, experts=None)
