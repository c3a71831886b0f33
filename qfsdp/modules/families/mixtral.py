"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from qfsdp.modules.decoder_parts import DecoderParts, MLPConfig
from qfsdp.modules.families.keys import Keys


def read(config: dict[str, Any], source: str) -> DecoderParts:
    keys = Keys(
        config,
        source,
        intermediate_size=14336,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        num_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.001,
    )
    keys.only("hidden_act", "silu")
    if keys.given("router_jitter_noise"):  # noise of the input while training
        raise keys.error("router_jitter_noise", keys.given("router_jitter_noise"), "0")
    return DecoderParts(
        **keys.sizes(),
        layers=keys.mixtures(keys.same_layers(keys.window())),
        norm=keys.norm(),
        mlp=MLPConfig("block_sparse_moe"),
        experts=keys.experts("intermediate_size", stored=("w1", "w3", "w2"), normalised=True),
    )
