"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from qfsdp.modules.decoder_parts import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    SharedExpert,
)
from qfsdp.modules.families.keys import Keys, family
from qfsdp.modules.families.rope_keys import rope_object


@family(
    "MixtralForCausalLM",
    intermediate_size=14336,
    max_position_embeddings=131072,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    num_experts=8,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.001,
)
def mixtral(keys: Keys) -> dict[str, Any]:
    """Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""
    if keys.given("router_jitter_noise"):  # noise of the input while training
        raise keys.error("router_jitter_noise", keys.given("router_jitter_noise"), "0")
    return {
        "layers": keys.mixtures(keys.same_layers(keys.window())),
        "mlp": MLPConfig("block_sparse_moe"),
        "experts": keys.experts("intermediate_size", stored=("w1", "w3", "w2"), normalised=True),
    }


@family(
    "OlmoeForCausalLM",
    intermediate_size=2048,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    num_experts=64,
    num_experts_per_tok=8,
    router_aux_loss_coef=0.01,
)
def olmoe(keys: Keys) -> dict[str, Any]:
    """OLMoE (arXiv:2409.02060): norms of whole projections, and a mixture of experts in every
    layer."""
    keys.only("clip_qkv", None)
    bias, normalised = keys.switch("attention_bias"), keys.switch("norm_topk_prob")
    return {
        "layers": keys.mixtures(keys.same_layers()),
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="projection"),
        "experts": keys.experts("intermediate_size", normalised=normalised),
    }


# ---- Qwen ----------------------------------------------------------------------------------------


@family(
    "Qwen2MoeForCausalLM",
    intermediate_size=5632,
    max_position_embeddings=32768,
    num_key_value_heads=16,
    sliding_window=4096,
    max_window_layers=28,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts=60,
    num_experts_per_tok=4,
    router_aux_loss_coef=0.001,
)
def qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Qwen2-MoE (arXiv:2407.10671) and Qwen1.5-MoE: Qwen 2 with mixtures of experts, and an expert
    with a gate that all tokens share. With `use_sliding_window`, every other one of the first
    `max_window_layers` has a window."""
    layers = keys.same_layers()
    if keys.switch("use_sliding_window"):
        last = keys.count("max_window_layers")
        windows = keys.windows(lambda index: index % 2 == 0 and index < last)
        layers = tuple(map(LayerConfig, windows, (layer.rope for layer in layers)))
    return {
        "layers": some_mixtures(keys, layers),
        "attention": AttentionConfig(qkv_bias=keys.switch("qkv_bias", True)),
        "experts": experts_beside_shared(keys, keys.switch("norm_topk_prob")),
    }


def experts_beside_shared(keys: Keys, normalised: bool) -> ExpertsConfig:
    """Qwen's experts, and one with a gate that all tokens share."""
    size = keys.size("shared_expert_intermediate_size")
    shared = SharedExpert("shared_expert", size, "shared_expert_gate")
    return replace(keys.experts(normalised=normalised), shared=shared)


@family(
    "Qwen3MoeForCausalLM",
    max_position_embeddings=32768,
    intermediate_size=6144,
    num_key_value_heads=4,
    sliding_window=4096,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    router_aux_loss_coef=0.001,
)
def qwen3_moe(keys: Keys) -> dict[str, Any]:
    """Qwen3-MoE (arXiv:2505.09388): Qwen 3 with mixtures of experts in place of feed-forwards."""
    bias = keys.switch("attention_bias")
    window = keys.window() if keys.switch("use_sliding_window") else None
    return {
        "layers": some_mixtures(keys, keys.same_layers(window)),
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="head"),
        "experts": keys.experts(normalised=keys.switch("norm_topk_prob")),
    }


def some_mixtures(keys: Keys, layers: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Every `decoder_sparse_step`-th layer is a mixture, except those of `mlp_only_layers`."""
    dense, step = keys.given("mlp_only_layers") or [], keys.size("decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise keys.error("mlp_only_layers", dense, "a list of indices of layers")
    return tuple(
        replace(layer, mixture=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(layers)
    )


# ---- GLM -----------------------------------------------------------------------------------------

# transformers 5 writes the first name, published files have the second.
PREDICTORS = ("num_mtp_layers", "num_nextn_predict_layers")


@family(
    "Glm4MoeForCausalLM",
    intermediate_size=10944,
    max_position_embeddings=131072,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    moe_intermediate_size=1408,
    num_experts=128,
    num_experts_per_tok=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    num_nextn_predict_layers=1,
)
def glm4_moe(keys: Keys) -> dict[str, Any]:
    """GLM-4.5 (arXiv:2508.06471), text: dense layers first, then mixtures that are chosen as in
    DeepSeek-V3 (arXiv:2412.19437), beside an expert that all tokens share."""
    dense, layers = keys.count("first_k_dense_replace"), keys.same_layers(shares=True)
    bias, qk_norm = keys.switch("attention_bias"), keys.switch("use_qk_norm")
    return {
        "layers": (*layers[:dense], *keys.mixtures(layers[dense:])),
        "attention": AttentionConfig(qkv_bias=bias, qk_norm="head" if qk_norm else None),
        "experts": _glm_experts(keys),
        "predictors": keys.count(keys.first_of(PREDICTORS, PREDICTORS[-1])),
    }


def _glm_experts(keys: Keys) -> ExpertsConfig:
    groups, chosen = keys.size("n_group", 1), keys.size("topk_group", 1)
    experts = keys.experts(
        kind="sigmoid",
        normalised=keys.switch("norm_topk_prob"),
        groups=groups,
        chosen_groups=chosen,
        factor=keys.number("routed_scaling_factor", 1.0),
    )
    size = experts.count // groups
    if experts.count % groups or (groups > 1 and size < 2):
        expected = f"a divisor of the {experts.count} experts, with two or more in a group"
        raise keys.error("n_group", groups, expected)
    if not experts.top_k <= chosen * size <= experts.count:
        expected = f"at most n_group ({groups}), with num_experts_per_tok ({experts.top_k}) experts"
        raise keys.error("topk_group", chosen, expected)
    shared = keys.size("n_shared_experts") * experts.intermediate_size
    return replace(experts, shared=SharedExpert("shared_experts", shared))


# ---- gpt-oss -------------------------------------------------------------------------------------

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@family(
    "GptOssForCausalLM",
    intermediate_size=2880,
    max_position_embeddings=131072,
    num_key_value_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    sliding_window=128,
    num_experts=128,
    num_experts_per_tok=4,
    router_aux_loss_coef=0.001,
)
def gpt_oss(keys: Keys) -> dict[str, Any]:
    """gpt-oss (arXiv:2508.10925): a mixture in every layer, a window in every other one, attention
    with sinks, and biases everywhere."""
    bias, rope = keys.switch("attention_bias", True), rope_object(keys, _GPT_OSS_ROPE)
    rotary, windows = keys.rope(rope=rope), keys.windows(lambda index: index % 2 == 0)
    clamp = keys.number("swiglu_limit", 7.0), keys.number("swiglu_alpha", 1.702)
    experts = keys.experts("intermediate_size", kind="chosen", bias=True, name="router")
    return {
        "layers": keys.mixtures(LayerConfig(window, rotary) for window in windows),
        "norm": keys.norm(rounds_once=True),
        "attention": AttentionConfig(qkv_bias=bias, o_bias=bias, sinks=True),
        "experts": replace(experts, bias=True, interleaved=True, transposed=True, clamp=clamp),
    }
