"""Model families: how each `config.json` becomes the parts of a decoder.

A family is a file with a function that takes the keys of a `config.json` and returns a
`DecoderParts`. The decoder knows no family. Checkpoint keys are parameter names: a family names
its modules where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import DecoderParts
from qfsdp.modules.families import (
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granite4,
    llama,
    ministral,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)

FAMILIES: dict[str, Callable[[dict[str, Any], str], DecoderParts]] = {
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen2MoeForCausalLM": qwen2_moe.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "OlmoeForCausalLM": olmoe.read,
    "MixtralForCausalLM": mixtral.read,
    "SmolLM3ForCausalLM": smollm3.read,
    "GraniteForCausalLM": granite.read,
    "GraniteMoeHybridForCausalLM": granite4.read,
    "SeedOssForCausalLM": seed_oss.read,
    "Olmo2ForCausalLM": olmo2.read,
    "Olmo3ForCausalLM": olmo3.read,
    "Gemma3ForCausalLM": gemma3.read,
    "Phi3ForCausalLM": phi3.read,
    "Glm4ForCausalLM": glm4.read,
    "Glm4MoeForCausalLM": glm4_moe.read,
    "GptOssForCausalLM": gpt_oss.read,
    "MinistralForCausalLM": ministral.read,
    "Ministral3ForCausalLM": ministral3.read,
}


def read(config: dict[str, Any], source: str) -> DecoderParts:
    """The decoder that a parsed `config.json` describes.

    Raises `UserError`, which names `source`, for an architecture that is not in `FAMILIES` and for
    values that the family does not have or the decoder does not compute.
    """
    names = config.get("architectures") or [None]
    architecture = names[0] if isinstance(names, list) else names
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
