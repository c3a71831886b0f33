"""Families without experts."""

from __future__ import annotations

import math
from typing import Any

from qfsdp.modules.decoder_parts import (
    AttentionConfig,
    LayerConfig,
    LayerNorms,
    MLPConfig,
    Multipliers,
)
from qfsdp.modules.families.keys import Keys, family
from qfsdp.modules.families.rope_keys import FULL, NEW, SLIDING, rope_object
from qfsdp.modules.families.values import NotComputed, Values
from qfsdp.modules.rope_scalings import QueryScaling


@family("LlamaForCausalLM", max_position_embeddings=2048)
def llama(keys: Keys) -> dict[str, Any]:
    """Llama 2 and 3 (arXiv:2307.09288, 2407.21783), Yi, SmolLM2."""
    bias = keys.switch("attention_bias")
    return {
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias),
        "mlp": MLPConfig(bias=keys.switch("mlp_bias")),
    }


# ---- Mistral -------------------------------------------------------------------------------------

_MISTRAL: Any = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


@family("MistralForCausalLM", **_MISTRAL)
def mistral(keys: Keys) -> dict[str, Any]:
    """Mistral (arXiv:2310.06825): Llama with a sliding window in every layer."""
    return {"layers": keys.same_layers(keys.window())}


@family("MinistralForCausalLM", **_MISTRAL)
def ministral(keys: Keys) -> dict[str, Any]:
    """Ministral (2410): Mistral with a sliding window in some layers."""
    rope, windows = keys.rope(), keys.windows(lambda index: True)
    return {"layers": tuple(LayerConfig(window, rope) for window in windows)}


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@family(
    "Ministral3ForCausalLM",
    max_position_embeddings=262144,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
)
def ministral3(keys: Keys) -> dict[str, Any]:
    """Ministral 3, text (2512): Mistral with YaRN, and longer queries at far positions."""
    values = rope_object(keys, _MINISTRAL3_ROPE)
    rope, scaling = Values(values, keys.source), None
    if rope.given("llama_4_scaling_beta"):  # 0: all queries as they are
        context = keys.size("max_position_embeddings")
        original = rope.size("original_max_position_embeddings", context)
        scaling = QueryScaling(rope.number("llama_4_scaling_beta"), original)
    return {"layers": keys.same_layers(keys.window(), rope=values, query_scaling=scaling)}


# ---- Qwen ----------------------------------------------------------------------------------------

_QWEN: Any = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@family("Qwen2ForCausalLM", **_QWEN)
def qwen2(keys: Keys) -> dict[str, Any]:
    """Qwen 2 and 2.5 (arXiv:2407.10671): Llama with biases of queries, keys and values."""
    return {"layers": _qwen_layers(keys), "attention": AttentionConfig(qkv_bias=True)}


@family("Qwen3ForCausalLM", head_dim=128, **_QWEN)
def qwen3(keys: Keys) -> dict[str, Any]:
    """Qwen 3 (arXiv:2505.09388): Llama with norms of every head's queries and keys."""
    bias = keys.switch("attention_bias")
    attention = AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return {"layers": _qwen_layers(keys), "attention": attention}


def _qwen_layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """The first `max_window_layers` attend to everything, the others have the window, where it is
    switched on."""
    if not keys.switch("use_sliding_window"):
        return keys.same_layers()
    first, rope = keys.count("max_window_layers"), keys.rope()
    windows = keys.windows(lambda index: index >= first)
    return tuple(LayerConfig(window, rope) for window in windows)


# ---- further variants of Llama -------------------------------------------------------------------


@family(
    "SmolLM3ForCausalLM",
    max_position_embeddings=32768,
    num_key_value_heads=4,
    rope_theta=2000000.0,
    tie_word_embeddings=True,
)
def smollm3(keys: Keys) -> dict[str, Any]:
    """SmolLM3: Llama in which every fourth layer has no rotary embedding (arXiv:2501.18795); 1 in
    `no_rope_layers` says that a layer has one."""
    every, rope = keys.size("no_rope_layer_interval", 4), keys.rope()
    rotated = keys.of_layers("no_rope_layers", (0, 1))
    if rotated is None:
        rotated = [(index + 1) % every != 0 for index in range(keys.size("num_hidden_layers"))]
    has_window = keys.switch("use_sliding_window")
    windows = keys.windows(lambda index: has_window and not rotated[index])
    both = zip(windows, rotated, strict=True)
    layers = tuple(LayerConfig(window, rope if is_rotated else None) for window, is_rotated in both)
    return {"layers": layers, **llama(keys)}


@family(
    "SeedOssForCausalLM",
    max_position_embeddings=524288,
    num_key_value_heads=8,
    head_dim=128,
    attention_bias=True,
)
def seed_oss(keys: Keys) -> dict[str, Any]:
    """Seed-OSS: Llama with biases of queries, keys and values. Its dropout is not computed."""
    bias, o_bias = keys.switch("attention_bias"), keys.switch("attention_out_bias")
    return {
        "attention": AttentionConfig(qkv_bias=bias, o_bias=o_bias),
        "mlp": MLPConfig(bias=keys.switch("mlp_bias")),
    }


@family(
    "Phi3ForCausalLM",
    max_position_embeddings=4096,
    original_max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
def phi3(keys: Keys) -> dict[str, Any]:
    """Phi-3 (arXiv:2404.14219), Phi-4 and Phi-4-mini (text): one linear for queries, keys and
    values, one for gate and up."""
    rope = rope_object(keys)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("su", "yarn"):  # LongRoPE's earlier names
        rope = rope | {"rope_type": "longrope"}
    elif kind not in ("default", "longrope"):
        raise keys.error("rope_type", kind, "longrope, su, yarn or default")
    return {
        "layers": keys.same_layers(keys.window(), rope=rope, shares=True),
        "attention": AttentionConfig(("qkv_proj",)),
        "mlp": MLPConfig(inner=("gate_up_proj",)),
    }


# ---- Granite -------------------------------------------------------------------------------------


@family("GraniteForCausalLM", max_position_embeddings=2048)
def granite(keys: Keys) -> dict[str, Any]:
    """Granite 3 (dense): Llama with fixed factors of embedding, attention, residual and logits."""
    return _granite(keys) | {"mlp": MLPConfig(bias=keys.switch("mlp_bias"))}


@family(
    "GraniteMoeHybridForCausalLM",
    intermediate="shared_intermediate_size",
    max_position_embeddings=2048,
    shared_intermediate_size=1024,
)
def granite4(keys: Keys) -> dict[str, Any]:
    """Granite 4 without experts and Mamba layers (GraniteMoeHybrid), as in its 350M and 1B
    models. transformers builds the others."""
    keys.only("num_local_experts", 0, absent=8)
    mamba = ("mamba", "linear_attention")
    for name in ("layer_types", "layers_block_type"):
        kinds = keys.of_layers(name, ("attention", FULL, *mamba)) or ()
        if (kind := next((one for one in kinds if one in mamba), None)) is not None:
            raise NotComputed(str(keys.error(name, kind, f"{FULL} for every layer")))
    if keys.given("layer_types") is None and keys.given("layers_block_type") is None:  # all Mamba
        raise NotComputed(str(keys.error("layer_types", None, f"{FULL} for every layer")))
    embedded = keys.given("position_embedding_type")
    if embedded not in (None, "rope", "nope"):
        raise keys.error("position_embedding_type", embedded, "'rope', 'nope' or null")
    layer = LayerConfig(rope=keys.rope() if embedded == "rope" else None)
    return _granite(keys) | {
        "layers": (layer,) * keys.size("num_hidden_layers"),
        "mlp": MLPConfig("shared_mlp", ("input_linear",), "output_linear"),
    }


def _granite(keys: Keys) -> dict[str, Any]:
    """What Granite 3 and 4 share."""
    bias, scale = keys.switch("attention_bias"), keys.number("attention_multiplier", 1.0)
    return {
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, scale=scale),
        "multipliers": Multipliers(
            embedding=keys.number("embedding_multiplier", 1.0),
            residual=keys.number("residual_multiplier", 1.0),
            logits=1.0 / keys.number("logits_scaling", 1.0),
        ),
    }


# ---- norms in other places -----------------------------------------------------------------------


@family("Olmo2ForCausalLM", max_position_embeddings=2048, rms_norm_eps=1e-5)
def olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward, and of whole
    projections."""
    bias = keys.switch("attention_bias")
    return {
        "norm": keys.norm(rounds_once=True),
        "norms": LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="projection"),
    }


_OLMO3_THETA = 500000.0


@family(
    "Olmo3ForCausalLM",
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=_OLMO3_THETA,
    sliding_window=4096,
)
def olmo3(keys: Keys) -> dict[str, Any]:
    """OLMo 3 (arXiv:2512.13961): OLMo 2 with a sliding window in three of four layers. Only the
    others are stretched for long contexts."""
    theta, objects = keys.given("rope_theta"), keys.object(NEW)
    if theta != _OLMO3_THETA and "rope_theta" not in (objects.get(SLIDING) or {}):
        # transformers 4 read it for all layers, 5 reads it for those without a window.
        expected = f"{_OLMO3_THETA}, or {NEW} with a base for each layer type"
        raise keys.error("rope_theta", theta, expected)
    return {"layers": keys.sliding_and_full(_OLMO3_THETA, every=4), **olmo2(keys)}


@family(
    "Gemma3ForCausalLM",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    max_position_embeddings=131072,
    num_key_value_heads=4,
    head_dim=256,
    rope_theta=1000000.0,
    rope_local_base_freq=10000.0,
    sliding_window=4096,
    tie_word_embeddings=True,
)
def gemma3(keys: Keys) -> dict[str, Any]:
    """Gemma 3, text (arXiv:2503.19786): norms on both sides, GeGLU, and five layers with a sliding
    window and their own rotary base for each layer without."""
    keys.only("use_bidirectional_attention", False)
    keys.only("attn_logit_softcapping", None)
    keys.only("final_logit_softcapping", None)
    bias, scale = keys.switch("attention_bias"), keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    every, theta = keys.size("sliding_window_pattern", 6), keys.number("rope_local_base_freq")
    return {
        "layers": keys.sliding_and_full(theta, every),
        "norm": keys.norm(rounds_once=True, offset=1.0),
        "norms": LayerNorms(
            before_attention="input_layernorm",
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="head", scale=scale),
        "mlp": MLPConfig(activation="gelu_tanh"),
        "multipliers": Multipliers(math.sqrt(keys.size("hidden_size")), rounds_embedding=True),
    }


@family(
    "Glm4ForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-07,
    partial_rotary_factor=0.5,
    attention_bias=True,
)
def glm4(keys: Keys) -> dict[str, Any]:
    """GLM-4-0414 (dense): norms on both sides, and rotary pairs of neighbours in half of every
    head."""
    return {
        "layers": keys.same_layers(interleaved=True, shares=True),
        "norms": LayerNorms(
            before_attention="input_layernorm",
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        "attention": AttentionConfig(qkv_bias=keys.switch("attention_bias")),
        "mlp": MLPConfig(inner=("gate_up_proj",)),
    }
