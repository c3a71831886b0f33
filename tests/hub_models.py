"""Random tiny models, saved by transformers, of architectures that qfsdp does not build itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.hub_models.config import Implementation
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
# Gated DeltaNet, and experts.
DELTA: dict[str, Any] = {
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"shared_expert_intermediate_size": 64},
}


def _configs() -> dict[str, Callable[[], Any]]:
    import transformers as t

    return {
        "qwen3_5": lambda: t.Qwen3_5TextConfig(**SIZES, **DELTA),
        "qwen3_5_moe": lambda: t.Qwen3_5MoeTextConfig(**SIZES, **DELTA, **EXPERTS),
        "qwen3_next": lambda: t.Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS),
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
        "gemma4_moe": lambda: t.Gemma4TextConfig(
            **SIZES,
            head_dim=32,
            global_head_dim=32,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=64,
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
        "qwen3": lambda: t.Qwen3Config(**SIZES, head_dim=32),
        "mixtral": lambda: t.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(**SIZES, **EXPERTS),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **SIZES, **EXPERTS, head_dim=32, norm_topk_prob=True, decoder_sparse_step=1
        ),
        "gemma3_text": lambda: t.Gemma3TextConfig(
            **SIZES, head_dim=32, sliding_window=40, query_pre_attn_scalar=32
        ),
        "mamba": lambda: t.MambaConfig(**SIZES),
        "apertus": lambda: t.ApertusConfig(**SIZES),
        "bamba": lambda: t.BambaConfig(
            **SIZES, attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16
        ),
        "falcon_h1": lambda: t.FalconH1Config(
            **SIZES, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16
        ),
        "glm4_7": lambda: t.Glm4MoeLiteConfig(
            **SIZES | {"num_key_value_heads": 4},
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
        ),
        "cohere2": lambda: t.Cohere2Config(**SIZES, sliding_window=16),
        "exaone4": lambda: t.Exaone4Config(**SIZES, sliding_window=16),
        "minimax_m2": lambda: t.MiniMaxM2Config(
            **SIZES, head_dim=32, rotary_dim=16, num_local_experts=4, num_experts_per_tok=2
        ),
        "nemotron_h": lambda: t.NemotronHConfig(
            **{key: size for key, size in SIZES.items() if key != "num_hidden_layers"},
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            head_dim=32,
            ssm_state_size=16,
            mamba_num_heads=8,
            mamba_head_dim=32,
            n_groups=2,
            n_routed_experts=4,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=64,
        ),
        "zamba2": lambda: t.Zamba2Config(
            **SIZES, layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1
        ),
        "llama4": lambda: t.Llama4TextConfig(
            **SIZES | {"num_hidden_layers": 2},
            head_dim=32,
            intermediate_size_mlp=192,
            num_local_experts=4,
            num_experts_per_tok=1,
        ),
        # Transposed linears; outputs that are changed in place; linears that are never called.
        "gpt2": lambda: t.GPT2Config(
            **SIZES | {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 256}
        ),
        "falcon": lambda: t.FalconConfig(**SIZES),
        "olmo": lambda: t.OlmoConfig(**SIZES, clip_qkv=0.3),
        "bart": lambda: t.BartConfig(
            **{key: SIZES[key] for key in SIZES if key.startswith(("vocab", "max", "pad"))},
            **{"d_model": 128, "decoder_layers": 4, "decoder_attention_heads": 4},
            **{"decoder_ffn_dim": 192, "encoder_layers": 4, "is_encoder_decoder": False},
            **{"is_decoder": True, "bos_token_id": 1, "eos_token_id": 2},
            forced_eos_token_id=None,  # a rule of `generate`
        ),
        **_multimodal(t),
    }


def _multimodal(t: Any) -> dict[str, Callable[[], Any]]:
    """Whole models: a text model beside a vision model whose linears have names of its linears."""
    siglip = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    siglip |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    qwen = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    qwen |= {"out_hidden_size": 128}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    sizes = SIZES | {"head_dim": 32}
    shared = ("bos_token_id", "eos_token_id", "pad_token_id")
    no_ids = {key: value for key, value in sizes.items() if key not in shared}
    return {
        "gemma3": lambda: t.Gemma3Config(
            text_config=sizes | {"sliding_window": 16, "query_pre_attn_scalar": 32},
            vision_config=siglip,
            mm_tokens_per_image=4,
        ),
        "gemma4_whole": lambda: t.Gemma4Config(
            text_config=_configs()["gemma4"]().to_dict(),
            vision_config=siglip | {"head_dim": 16, "num_key_value_heads": 2},
            audio_config=None,
        ),
        "qwen3_5_whole": lambda: t.Qwen3_5Config(
            text_config=no_ids | DELTA | {"tie_word_embeddings": False}, vision_config=qwen
        ),
        "qwen3_5_moe_whole": lambda: t.Qwen3_5MoeConfig(
            text_config=no_ids | DELTA | EXPERTS, vision_config=qwen
        ),
        "qwen3_vl": lambda: t.Qwen3VLConfig(
            text_config=no_ids | {"rope_parameters": rope},
            vision_config=qwen | {"deepstack_visual_indexes": [0, 1]},
        ),
        "mistral3": lambda: t.Mistral3Config(
            text_config={"model_type": "mistral", **sizes},
            vision_config={"model_type": "pixtral", **siglip, "head_dim": 16},
        ),
    }


MULTIMODAL = ["gemma3", "gemma4_whole", "qwen3_5_whole", "qwen3_vl", "mistral3"]
NAMES = ["qwen3_5", "gemma4", "deepseek_v3", "lfm2", "llama"]
# Recurrent layers, shared keys and values, and experts are in the short suite.
MIXTURES = ["qwen3_5_moe", "glm4_7", "gemma4_moe"]
OTHERS = ["gpt2", "falcon", "olmo"]
# Which we build too.
HYBRID = ["qwen3_5", "qwen3_5_whole", "qwen3_5_moe", "qwen3_next", "qwen3_5_moe_whole"]
PARAMETERS = [
    *(*NAMES[:3], MULTIMODAL[0]),
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in NAMES[3:] + MULTIMODAL[1:] + MIXTURES + OTHERS
    ),
]


EXPERT_NAMES = ["experts.gate_up_proj", "experts.down_proj"]


def adapter_of(name: str, rank: int = 4) -> AdapterConfig:
    """DoRA of all linears; of a mixture LoRA, with its experts: PEFT has no DoRA of these."""
    if name in (*MIXTURES, "deepseek_v3", "qwen3_next", "qwen3_5_moe_whole"):
        return AdapterConfig("lora", rank=rank, alpha=8, targets=["all-linear", *EXPERT_NAMES])
    return AdapterConfig("dora", rank=rank, alpha=8)


def class_of(config: Any) -> Any:
    """The Auto class that has the model of a config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = config.get_text_config() is not config
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def config(name: str) -> Any:
    """transformers' config of a model, as its folder has it."""
    found = _configs()[name]()
    with torch.device("meta"):
        found.architectures = [type(class_of(found).from_config(found)).__name__]
    return found


def save_hub_model(name: str, folder: Path, **changes: Any) -> nn.Module:
    """Writes a random model, with changes of its config; returns it, in fp32."""
    torch.manual_seed(0)
    given = _configs()[name]()
    for key, value in changes.items():
        setattr(given, key, value)
    model: Any = class_of(given).from_config(given).float().eval()
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.05)
    for module in model.modules():
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            bias.normal_()
        if (scalar := getattr(module, "layer_scalar", None)) is not None:
            scalar.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    if name.startswith("qwen3_5"):  # a layer that predicts further tokens, which is not read
        more = {"mtp.fc.weight": torch.randn(8, 16)}
        save_file(load_file(folder / SINGLE) | more, folder / SINGLE, {"format": "pt"})
    return model


def check_200_tokens(model: Any, prompts: list[list[int]], cache: Any, given: Tensor) -> None:
    """The next 200 tokens of prompts, `given` to an empty cache at first, have the logits and are
    the tokens of computing everything anew for each."""
    rows, found = [list(prompt) for prompt in prompts], list[Tensor]()
    with torch.no_grad():
        for _ in range(200):
            found.append(model(given, cache=cache))
            given = found[-1].argmax(-1, keepdim=True)
            for row, token in zip(rows, given.flatten().tolist(), strict=True):
                row.append(token)
        for at, row in enumerate(rows):
            anew = model(torch.tensor([row[:-1]]))[0, -200:]
            kept = torch.stack([logits[at] for logits in found])
            assert (kept - anew).abs().max() <= 1e-5 * anew.abs().max()
            assert anew.argmax(-1).tolist() == row[-200:]


def with_tokenizer(name: str, folder: Path, tokenizer: Path) -> Path:
    """A random model folder with the tokenizer of another folder: SmolLM2's 49,152 tokens."""
    given = _configs()[name]()
    text = given.get_text_config()
    text.vocab_size = 49152
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = 49152
    class_of(given).from_config(given).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).symlink_to(tokenizer / file)
    return folder


def built(
    folder: Path,
    adapter: AdapterConfig | None = None,
    activation: ActivationConfig | None = None,
    implementation: Implementation = "transformers",
) -> Any:
    """A loaded model, of transformers or ours, in NF4 if it is adapted."""
    config = ModelConfig(str(folder), dtype="fp32", implementation=implementation)
    model = config.build()
    assert isinstance(model, HubDecoder) == (implementation == "transformers")
    if adapter is not None:
        quantize_linears(model, QuantizationConfig())
        add_adapters(model, adapter)
    model.set_activations(activation or ActivationConfig())
    load_base(model, config.weights(), torch.device("cpu"))
    if adapter is not None:
        init_adapters(model, seed=0)
        randomize_adapters(model)
    return model.train()
