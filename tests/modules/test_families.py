"""Every model family against `transformers`, on random tiny models that use all its switches."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qfsdp.common.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.trainable import TrainableConfig, set_trainable
from qfsdp.modules.transformer import Decoder
from tests.modules.random_configs import OPTIONS, compare, random_config, randomize, with_our_names
from tests.modules.rope_spellings import DETAILS, KINDS, LENGTHS, PLACES, spelled

CPU = torch.device("cpu")
LONG = pytest.mark.long
SEQ, NEW = 40, 14
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 132,  # heads of 22 numbers
    "intermediate_size": 147,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 32
SHORT = {**YARN, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GRANITE = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.31,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.3,
}
GEMMA = {"head_dim": 34, "sliding_window": 7, "query_pre_attn_scalar": 23, "attention_bias": True}
GRANITE4 = {"num_local_experts": 0, "shared_intermediate_size": 147, "layer_types": None}
GRANITE4 |= {"layer_types": ["full_attention"] * 4, "mamba_n_heads": 6, "mamba_d_head": "auto"}
LONGROPE = {"rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(8)]}
LONGROPE |= {"long_factor": [1.5 + 0.5 * i for i in range(8)]}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 36}
HYBRID = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
# The gated norm makes rounding of results near zero large; a large epsilon does not let it.
HYBRID |= {
    "rms_norm_eps": 0.01,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "attention_bias": True,
}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 41}
GLM4_MOE = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 36}
# What is tested -> (model_type, keys of config.json).
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-yarn": ("llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn-details": (
        "llama",
        {"rope_parameters": SHORT | {"beta_fast": 8, "beta_slow": 2, "truncate": False}},
    ),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}, "head_dim": 34},
    ),
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 0.8}}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama-dynamic-longer": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 26}),
    "mistral-yarn": ("mistral", {"rope_parameters": YARN, "sliding_window": 7}),
    "qwen3-yarn-mixed": (
        "qwen3",
        {
            "rope_parameters": YARN,
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": MIXED,
        },
    ),
    "smollm3": (
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3-listed": (
        "smollm3",
        {"no_rope_layers": [1, 0, 0, 1], "rope_parameters": YARN, "tie_word_embeddings": False},
    ),
    "granite": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite-tied": ("granite", {**GRANITE, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "granite4": (
        "granitemoehybrid",
        {**GRANITE, **GRANITE4, "position_embedding_type": "rope", "attention_bias": True},
    ),
    "granite4-no-rope": (
        "granitemoehybrid",
        {**GRANITE, **GRANITE4, "position_embedding_type": "nope"},
    ),
    "seed-oss": (
        "seed_oss",
        {"head_dim": 16, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("olmo2", {"attention_bias": True, "rope_parameters": YARN}),
    "olmo3": (
        "olmo3",
        {
            "attention_bias": True,
            "sliding_window": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
                "full_attention": YARN,
            },
        },
    ),
    "qwen3-5": ("qwen3_5_text", {**HYBRID, "linear_conv_kernel_dim": 3}),
    "qwen3-5-listed": (
        "qwen3_5_text",
        {
            **HYBRID,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-5-moe": ("qwen3_5_moe_text", {**HYBRID, **SHARED_EXPERT}),
    "qwen3-next": ("qwen3_next", {**HYBRID, **SHARED_EXPERT, "mlp_only_layers": [1]}),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window_pattern": 2}),
    "gemma3-untied": (
        "gemma3_text",
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "layer_types": MIXED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48},
    ),
    "phi3-longrope-longer": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4},
    ),
    "glm4": ("glm4", {"head_dim": 32, "attention_bias": True}),
    "glm4-share": (
        "glm4",
        {"head_dim": 40, "rope_parameters": YARN | {"partial_rotary_factor": 0.75}},
    ),
    "ministral": ("ministral", {"sliding_window": 7, "layer_types": MIXED, "head_dim": 34}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "norm_topk_prob": True,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "qwen3-moe-dense-layers": (
        "qwen3_moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "olmoe": ("olmoe", {**EXPERTS, "intermediate_size": 36, "attention_bias": True}),
    "olmoe-normalised": ("olmoe", {**EXPERTS, "intermediate_size": 36, "norm_topk_prob": True}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 5, "intermediate_size": 36, "sliding_window": 7, "head_dim": 34},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **GPT_OSS,
            "head_dim": 34,
            "sliding_window": 7,
            "swiglu_limit": 1.2,  # so that some numbers are clamped
            "swiglu_alpha": 1.4,
            "rope_parameters": SHORT | {"truncate": False},
        },
    ),
    "gpt-oss-default": ("gpt_oss", {**GPT_OSS, "attention_bias": False, "layer_types": MIXED}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 52,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "rope_parameters": YARN,
        },
    ),
    "qwen2-moe-window": (
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 52,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            **GLM4_MOE,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.75},
        },
    ),
    "glm4-moe-plain": (
        "glm4_moe",
        {**GLM4_MOE, "head_dim": 32, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 34,
            "sliding_window": 7,
            "rope_parameters": SHORT | {"llama_4_scaling_beta": 0.4},
        },
    ),
}


# Devstral 2: queries are not scaled.
TINY["ministral3-as-they-are"] = (
    "ministral3",
    {"head_dim": 32, "rope_parameters": SHORT | {"llama_4_scaling_beta": 0}},
)


def tiny_config(name: str) -> PreTrainedConfig:
    model_type, changes = TINY[name]
    return CONFIG_MAPPING[model_type](**SIZES | changes)


def reference(name: str) -> PreTrainedModel:
    return randomized(tiny_config(name))


def randomized(config: PreTrainedConfig) -> PreTrainedModel:
    """A `transformers` model; random norms and biases, so that none can be left out."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    return model


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    """The config.json that `save_pretrained` writes, with every default."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def ours(model: PreTrainedModel) -> Decoder:
    """Our decoder with the weights of `model`; every key must match."""
    decoder = Decoder(DecoderConfig.from_dict(config_of(model)))
    decoder.load_state_dict(
        with_our_names(model.state_dict(), model.config.model_type), strict=True
    )
    return decoder


def random_tokens(batch: int = 2) -> Tensor:
    return torch.randint(1, 131, (batch, SEQ), generator=torch.Generator().manual_seed(1))


def max_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", TINY)
def test_logits_and_all_gradients_match_transformers(name: str) -> None:
    model, tokens = reference(name), random_tokens()
    decoder = ours(model)
    expected = model(tokens).logits
    assert expected.std() > 0.3  # else the bound below would say little
    assert max_difference(decoder(tokens), expected) < 1e-4
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    decoder(tokens, labels=labels).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    of_theirs = with_our_names(gradients, model.config.model_type)
    ours_trained = {key: p for key, p in decoder.named_parameters() if p.requires_grad}
    assert of_theirs.keys() == ours_trained.keys()
    largest = max(gradient.abs().max().item() for gradient in of_theirs.values())
    for key, parameter in ours_trained.items():
        gradient, want = parameter.grad, of_theirs[key]
        assert gradient is not None and want is not None
        # Without positions a bias of keys changes no softmax: its gradient is rounding alone.
        # 7.5e-6 at most on a Zen 4 (OLMo 2). Other CPUs add in another order. On a Xeon with AMX it
        # is 2.2e-5 for A_log of Qwen3.5: either is 1.7e-5 off the gradient in fp64.
        size = max(want.abs().max().item(), 1e-2 * largest)
        assert max_difference(gradient, want) < 5e-5 * size, key


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_match_transformers(name: str) -> None:
    model, tokens = reference(name), random_tokens()
    model.generation_config.eos_token_id = None
    prompts = [tokens[0, :5].tolist(), tokens[1, :11].tolist()]
    found = generate(ours(model), prompts, SamplingConfig(max_new_tokens=NEW), set(), World(CPU))
    for prompt, answer in zip(prompts, found, strict=True):
        given: Any = torch.tensor([prompt])
        whole = model.generate(given, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        assert whole[0, len(prompt) :].tolist() == answer


def test_the_correction_of_a_router_stays_fp32_and_is_not_trained(tmp_path: Path) -> None:
    decoder = ours(reference("glm4-moe"))
    key = "model.layers.2.mlp.gate.e_score_correction_bias"
    before = decoder.get_parameter(key).clone()
    decoder.to(torch.bfloat16)
    set_trainable(decoder, TrainableConfig(dtype="bf16"), tmp_path)
    assert decoder.get_parameter(key).equal(before) and before.dtype == torch.float32
    frozen = {name for name, p in decoder.named_parameters() if not p.requires_grad}
    assert frozen == {key.replace("2", str(layer), 1) for layer in (1, 2, 3)}


# ---- layers of several kinds --------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_second_pass_sends_no_constants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `torch.tensor(numbers, device=...)` waits for all that runs, and ends a capture."""
    config = tiny_config(name)
    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    decoder = Decoder(
        DecoderConfig.from_dict({**config.to_dict(), "architectures": architectures})
    ).eval()
    decoder(random_tokens())

    def sent(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a constant was sent to the device")

    monkeypatch.setattr(torch, "tensor", sent)
    decoder(random_tokens())


MIXED_FAMILIES = ["smollm3", "olmo3", "gemma3", "ministral", "qwen3-yarn-mixed", "ministral3"]
MIXED_FAMILIES += ["qwen3-moe-dense-layers"]
MIXED_FAMILIES += ["gpt-oss", "qwen2-moe-window"]
RECURRENT = ["qwen3-5", "qwen3-5-moe", "qwen3-next"]


@pytest.mark.parametrize("name", [*MIXED_FAMILIES, *RECURRENT])
@torch.no_grad()
def test_packed_rows_equal_separate_ones(name: str) -> None:
    decoder, tokens, lengths = ours(reference(name)), random_tokens(1), [23, 17]
    separate = torch.cat([decoder(part) for part in tokens.split(lengths, dim=1)], dim=1)
    bounds = torch.tensor([0, 23, 40], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    assert max_difference(decoder(tokens, positions, cu_seqlens=bounds), separate) < 1e-4
    assert max_difference(decoder(tokens), separate) > 0.01


@pytest.mark.parametrize("name", MIXED_FAMILIES)
@torch.no_grad()
def test_windows_are_those_of_the_layers(name: str) -> None:
    """Without windows, or with them in every layer, the logits are others."""
    decoder, tokens = ours(reference(name)), random_tokens()
    config = decoder.config
    for window in (None, 7):
        layers = tuple(dataclasses.replace(kind, window=window) for kind in config.layers)
        if layers != config.layers:
            other = Decoder(dataclasses.replace(config, layers=layers))
            other.load_state_dict(decoder.state_dict())
            assert max_difference(other(tokens), decoder(tokens)) > 0.01
    assert config.shortest_window == 7


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        pytest.param("smollm3", False, marks=pytest.mark.slow),
        ("gemma3", True),
        pytest.param("olmo3", False, marks=pytest.mark.slow),
        pytest.param("ministral3", True, marks=pytest.mark.slow),
        pytest.param("phi3-longrope", False, marks=pytest.mark.slow),
        ("glm4", True),
        pytest.param("qwen3-moe-dense-layers", True, marks=pytest.mark.slow),
        ("gpt-oss", True),
        ("qwen3-5", True),
        ("qwen3-next", False),
        pytest.param("gpt-oss", False, marks=pytest.mark.slow),
        pytest.param("glm4-moe", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_are_one_graph_for_each_kind(name: str, packed: bool) -> None:
    """Two builds for each kind of layer: the first layer's input needs no gradient."""
    decoder, tokens = ours(reference(name)), random_tokens(1)
    given: dict[str, Any] = {"labels": tokens}
    if packed:
        given["positions"] = torch.arange(20).repeat(1, 2)
        given["cu_seqlens"] = torch.tensor([0, 20, 40], dtype=torch.int32)
    expected = decoder(tokens, **given)
    expected.backward()
    trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    gradients = [parameter.grad.clone() for parameter in trained]
    decoder.zero_grad()
    torch._dynamo.reset()
    counters.clear()
    for layer in decoder.model.layers:
        layer.block = torch.compile(layer.block, backend="aot_eager", fullgraph=True)
    loss = decoder(tokens, **given)
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-6)
    for parameter, gradient in zip(trained, gradients, strict=True):
        assert max_difference(parameter.grad, gradient) < 1e-5 * gradient.abs().max() + 1e-6
    assert counters["stats"]["unique_graphs"] <= 2 * len(set(decoder.config.layers))


# ---- config.json --------------------------------------------------------------------------------

OLD_SPELLING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "rope_theta": 70000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "olmo3": ("olmo3", {"rope_theta": 500000.0, "rope_scaling": YARN | {"attention_factor": 1.2}}),
    "phi3": (
        "phi3",
        {
            "rope_theta": 20000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "type": "su",
                "original_max_position_embeddings": 32,
                "short_factor": LONGROPE["short_factor"],
                "long_factor": LONGROPE["long_factor"],
            },
        },
    ),
    "glm4": ("glm4", {"rope_theta": 20000.0, "partial_rotary_factor": 0.25, "head_dim": 32}),
    "smollm3": ("smollm3", {"rope_theta": 5000000.0, "no_rope_layers": [1, 1, 0, 1, 1]}),
    "yarn": ("llama", {"rope_theta": 20000.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}),
}
MODEL_TYPES = sorted({model_type for model_type, _ in TINY.values()})
ARCHITECTURE = {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in MODEL_TYPES}
MINIMAL = {
    "vocab_size": 131,
    "hidden_size": 768,
    "intermediate_size": 147,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}


@pytest.mark.parametrize("name", [*OLD_SPELLING, *(f"minimal-{kind}" for kind in MODEL_TYPES)])
def test_config_is_read_as_transformers_reads_it(name: str) -> None:
    """Old keys; and no optional key at all: defaults are those of Hugging Face."""
    model_type, keys = OLD_SPELLING.get(name, (name.removeprefix("minimal-"), {}))
    old = SIZES | keys if keys else dict(MINIMAL)
    if model_type == "granitemoehybrid":
        old |= {"num_local_experts": 0, "layer_types": ["attention"] * 8}
    architecture = {"architectures": [ARCHITECTURE[model_type]]}
    new = CONFIG_MAPPING[model_type](**copy.deepcopy(old)).to_dict() | architecture
    assert DecoderConfig.from_dict(old | architecture) == DecoderConfig.from_dict(new)


# What differs from the plain way of writing it: model type, keys of config.json.
SPELLED: dict[str, tuple[str, dict[str, Any]]] = {
    "both": ("llama", {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}),
    "both-linear": (
        "qwen3",
        {
            "rope_scaling": {"type": "linear", "factor": 4},
            "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0},
            "rope_theta": 3000.0,
        },
    ),
    "share-of-whole-heads": ("llama", {"partial_rotary_factor": 0.5}),
    "share-in-the-object": (
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "share-null": ("glm4", {"partial_rotary_factor": None, "head_dim": 32}),
    "original-outside": ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 8}),
    "original-outside-nested": (
        "gemma3_text",
        {
            "rope_parameters": {"full_attention": YARN, "sliding_attention": None},
            "original_max_position_embeddings": 8,
        },
    ),
    "truncate-nested": (
        "olmo3",
        {"rope_parameters": {"full_attention": SHORT | {"truncate": False, "beta_fast": 8}}},
    ),
    "truncate-beside": (
        "olmo3",
        {"rope_parameters": {"full_attention": SHORT | {"beta_fast": 8}, "truncate": False}},
    ),
    "both-nested": (
        "gemma3_text",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DYNAMIC},
        },
    ),
    "factor-null": ("llama", {"rope_scaling": SHORT | {"factor": None}}),
    "empty-object": ("gpt_oss", {**GPT_OSS, "rope_parameters": {}}),
    "empty-old-object": ("gpt_oss", {**GPT_OSS, "rope_scaling": {}}),
    "su": (
        "phi3",
        {
            "rope_scaling": {
                **{"type": "su", "original_max_position_embeddings": 8},
                **{"short_factor": [1.0] * 11, "long_factor": [3.0] * 11},
            },
            "original_max_position_embeddings": 32,
        },
    ),
}


@pytest.mark.parametrize("name", SPELLED)
def test_spellings_mean_what_they_mean_to_transformers(name: str) -> None:
    model_type, keys = SPELLED[name]
    config = SIZES | keys | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]}
    assert compare(model_type, config)[0] == "equal"


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_and_detail_of_a_rope_is_computed_or_refused(kind: str) -> None:
    """`python -m tests.modules.rope_spellings` has all of them, for every family."""
    types, places, computed = list(OPTIONS), list(PLACES), 0
    for index, detail in list(enumerate(DETAILS))[list(KINDS).index(kind) % 2 :: 2]:
        model_type, place = types[index % len(types)], places[index % len(places)]
        config = spelled(model_type, kind, place, detail)
        outcome, what = compare(model_type, config, LENGTHS)
        assert outcome != "differs", (what, config)
        computed += outcome == "equal"
    assert computed >= 4 or kind == "proportional"  # which our decoder does not have


@pytest.mark.parametrize(
    "seed", [*range(21), *(pytest.param(n, marks=LONG) for n in range(21, 120))]
)
def test_random_configs_are_computed_or_refused(seed: int) -> None:
    """`python -m tests.modules.random_configs 400` runs more."""
    outcome, what = compare(*random_config(seed))
    assert outcome != "differs", what


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0.*null"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0.*null"),
        ("gemma3", {"use_bidirectional_attention": True}, "is True; expected false"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'.*_tanh"),
        ("granite4", {"num_local_experts": 4}, "num_local_experts is 4; expected 0"),
        ("granite4", {"layer_types": ["mamba"] * 4}, "layer_types is 'mamba'; .*attention"),
        ("granite4", {"layer_types": None}, "layer_types is None; expected full_attention"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; expected a number above 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*for each of 4 layers"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ("phi3-longrope", {"rope_parameters": LONGROPE | {"short_factor": [1]}}, "short_factor"),
        ("llama-yarn", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs factor"),
        ("llama-yarn", {"rope_parameters": {"rope_type": ["yarn"]}}, "is unknown; expected one"),
        ("llama-yarn", {"architectures": [{}]}, "architecture {} is unknown"),
        (
            "gemma3",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "takes more than text; expected the text model alone .*Gemma3ForCausalLM",
        ),
        ("glm4", {"architectures": ["Glm5ForCausalLM"]}, "Glm5ForCausalLM.*Glm4ForCausalLM"),
        (
            "glm4-moe",
            {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512},
            "'DeepseekV3ForCausalLM' has latent attention .kv_lora_rank., which is not computed",
        ),
        ("glm4-moe", {"n_group": 4}, "n_group is 4; expected a divisor of the 6 experts"),
        ("glm4-moe", {"topk_group": 1}, "topk_group is 1; expected at most n_group"),
        ("glm4-moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; expected"),
        ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit is 0; expected a number above 0"),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ("qwen2-moe", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6; expected at most"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str
) -> None:
    config = tiny_config(name).to_dict() | {"architectures": [ARCHITECTURE[TINY[name][0]]]}
    with pytest.raises(UserError, match=words) as caught:
        DecoderConfig.from_dict(config | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [
        ("ssssssss", (0, 1)),
        ("sssfsssf", (0, 4)),
        ("sssfsssfss", (0, 4)),
        ("fsssssss", (1, 1)),
        ("sffsfsfsf", (2, 2)),
        ("s", (0, 1)),
    ],
)
def test_the_pattern_that_layers_repeat(kinds: str, pattern: tuple[int, int]) -> None:
    """The memory estimate runs two depths that differ by a pattern."""
    types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    config = tiny_config("ministral").to_dict() | {"architectures": ["MinistralForCausalLM"]}
    config |= {"layer_types": types, "num_hidden_layers": len(kinds)}
    assert DecoderConfig.from_dict(config).pattern == pattern


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2, 3]}),
        ("qwen2-moe", {"decoder_sparse_step": 9}),
        ("glm4-moe", {"first_k_dense_replace": 4}),
    ],
)
def test_a_mixture_whose_layers_are_all_dense_is_a_dense_model(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, keys = TINY[name]
    monkeypatch.setitem(TINY, name, (model_type, keys | changes))
    model, tokens = reference(name), random_tokens()
    decoder, labels = ours(model), F.pad(tokens[:, 1:], (0, 1), value=-100)
    loss = decoder.train()(tokens, labels=labels)
    loss.backward()
    logits = model(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    assert torch.allclose(loss, expected, rtol=1e-5) and decoder.config.experts is None


@pytest.mark.parametrize("key", ["num_mtp_layers", "num_nextn_predict_layers"])
def test_both_names_of_the_number_of_predictors(key: str) -> None:
    config = tiny_config("glm4-moe").to_dict() | {"architectures": ["Glm4MoeForCausalLM"]}
    for name in ("num_mtp_layers", "num_nextn_predict_layers"):
        config.pop(name, None)
    assert DecoderConfig.from_dict(config).predictors == 1
    assert DecoderConfig.from_dict(config | {key: 3}).predictors == 3
