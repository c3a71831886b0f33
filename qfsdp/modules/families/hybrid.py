"""Families with two kinds of layers: attention, and recurrent ones (Gated DeltaNet)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import (
    AttentionConfig,
    DecoderParts,
    LayerConfig,
    RecurrentConfig,
)
from qfsdp.modules.families.keys import FAMILIES, Keys, Read, family
from qfsdp.modules.families.mixtures import experts_beside_shared, some_mixtures
from qfsdp.modules.families.rope_keys import FULL

RECURRENT = "linear_attention"
_QWEN: Any = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MIXTURE: Any = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}


@family("Qwen3_5ForCausalLM", num_key_value_heads=4, **_QWEN)
def qwen3_5(keys: Keys) -> dict[str, Any]:
    """Qwen 3.5 and 3.6, text: three recurrent layers for each with gated attention."""
    return _hybrid(keys)


@family(
    "Qwen3_5MoeForCausalLM",
    intermediate="moe_intermediate_size",
    num_experts=256,
    num_experts_per_tok=8,
    **_QWEN | _MIXTURE,
)
def qwen3_5_moe(keys: Keys) -> dict[str, Any]:
    """Qwen 3.5 and 3.6 with a mixture in every layer."""
    parts = _hybrid(keys)
    parts["experts"] = experts_beside_shared(keys, True)
    return parts | {"layers": keys.mixtures(parts["layers"])}


@family(
    "Qwen3NextForCausalLM",
    intermediate_size=5632,
    num_experts=512,
    num_experts_per_tok=10,
    norm_topk_prob=True,
    **_QWEN | _MIXTURE,
)
def qwen3_next(keys: Keys) -> dict[str, Any]:
    """Qwen3-Next: one linear for all of a recurrent layer, head by head."""
    parts = _hybrid(keys, fused=True)
    parts["experts"] = experts_beside_shared(keys, keys.switch("norm_topk_prob"))
    return parts | {"layers": some_mixtures(keys, parts["layers"])}


def _hybrid(keys: Keys, fused: bool = False) -> dict[str, Any]:
    bias, every = keys.switch("attention_bias"), keys.size("full_attention_interval")
    kinds = keys.of_layers("layer_types", (FULL, RECURRENT))
    if kinds is None:
        count = keys.size("num_hidden_layers")
        kinds = [RECURRENT if (index + 1) % every else FULL for index in range(count)]
    full = LayerConfig(rope=keys.rope(shares=True))
    recurrent = LayerConfig(rope=None, recurrent=True)
    heads = keys.size("linear_num_key_heads"), keys.size("linear_num_value_heads")
    if heads[1] % heads[0]:
        expected = f"a multiple of linear_num_key_heads ({heads[0]})"
        raise keys.error("linear_num_value_heads", heads[1], expected)
    names = ("key_head_dim", "value_head_dim", "conv_kernel_dim")
    key, value, taps = (keys.size(f"linear_{name}") for name in names)
    return {
        "layers": tuple(full if kind == FULL else recurrent for kind in kinds),
        "norm": keys.norm(rounds_once=True, offset=1.0),
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="head", gated=True),
        "recurrent": RecurrentConfig(*heads, key, value, taps, fused),
    }


def _of_whole(architecture: str) -> Read:
    """Reads the text model of a model that takes more than text."""

    def read(config: dict[str, Any], source: str) -> DecoderParts:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise UserError(f"{source}: text_config is {text!r:.50}; expected an object")
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        parts = FAMILIES[architecture](text | tied, f"{source}: text_config")
        return replace(parts, body="model.language_model")

    return read


for _kind in ("Qwen3_5", "Qwen3_5Moe"):
    FAMILIES[f"{_kind}ForConditionalGeneration"] = _of_whole(f"{_kind}ForCausalLM")
