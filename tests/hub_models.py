"""Random tiny models, saved by transformers, of architectures that qfsdp does not build itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.hub_models.decoder import HubDecoder
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from tests.models import randomize_adapters

SIZES: dict[str, Any] = {
    "vocab_size": 577,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _configs() -> dict[str, Callable[[], Any]]:
    import transformers as t

    return {
        "qwen3_5": lambda: t.Qwen3_5TextConfig(
            **SIZES,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
        ),
        "gemma4": lambda: t.Gemma4TextConfig(
            **SIZES,
            head_dim=32,
            global_head_dim=32,
            sliding_window=16,
            vocab_size_per_layer_input=577,
            hidden_size_per_layer_input=32,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            final_logit_softcapping=30.0,
        ),
        "deepseek_v3": lambda: t.DeepseekV3Config(
            **SIZES | {"num_key_value_heads": 4},
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
            first_k_dense_replace=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            n_group=1,
            topk_group=1,
        ),
        "lfm2": lambda: t.Lfm2Config(**SIZES, full_attn_idxs=[1, 3]),
        "llama": lambda: t.LlamaConfig(**SIZES),
    }


NAMES = ["qwen3_5", "gemma4", "deepseek_v3", "lfm2", "llama"]
# Recurrent layers, shared keys and values, and experts are in the short suite.
PARAMETERS = [*NAMES[:3], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[3:])]


def save_hub_model(name: str, folder: Path) -> nn.Module:
    """Writes a random model; returns it, in fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_configs()[name]()).float().eval()
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.05)
    for module in model.modules():
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            bias.normal_()
        if (scalar := getattr(module, "layer_scalar", None)) is not None:
            scalar.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def built(
    folder: Path, adapter: AdapterConfig | None = None, activation: ActivationConfig | None = None
) -> HubDecoder:
    """A loaded model of transformers, in NF4 if it is adapted."""
    config = ModelConfig(str(folder), dtype="fp32", implementation="transformers")
    model = config.build()
    assert isinstance(model, HubDecoder)
    if adapter is not None:
        quantize_linears(model, QuantizationConfig())
        add_adapters(model, adapter)
    model.set_activations(activation or ActivationConfig())
    load_base(model, config.weights(), torch.device("cpu"))
    if adapter is not None:
        init_adapters(model, seed=0)
        randomize_adapters(model)
    return model.train()
