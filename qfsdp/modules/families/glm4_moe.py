"""GLM-4.5 (arXiv:2508.06471), text: dense layers first, then mixtures that are chosen as in
DeepSeek-V3 (arXiv:2412.19437), beside an expert that all tokens share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qfsdp.modules.decoder_parts import AttentionConfig, DecoderParts, ExpertsConfig, SharedExpert
from qfsdp.modules.families.keys import Keys

# transformers 5 writes the first name, published files have the second.
PREDICTORS = ("num_mtp_layers", "num_nextn_predict_layers")


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
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
    predictors = next(name for name in PREDICTORS if name in config or name == PREDICTORS[-1])
    keys.only("hidden_act", "silu")
    dense, layers = keys.count("first_k_dense_replace"), keys.same_layers(shares=True)
    return DecoderParts(
        **keys.sizes(),
        layers=(*layers[:dense], *keys.mixtures(layers[dense:])),
        norm=keys.norm(),
        attention=AttentionConfig(
            qkv_bias=keys.switch("attention_bias"),
            qk_norm="head" if keys.switch("use_qk_norm") else None,
        ),
        experts=_experts(keys),
        predictors=keys.count(predictors),
    )


def _experts(keys: Keys) -> ExpertsConfig:
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
