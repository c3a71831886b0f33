"""Random `config.json` of every family, and our logits on them beside those of transformers.

    python -m tests.modules.random_configs [count] [first seed]

prints one line for every config that differs, and the counts. `compare` says of one config what
transformers and we make of it. Tests run a slice of the seeds.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder

SEQ, LAYERS = 40, 4
EITHER = [True, False]
WINDOWS = [5, 11, 64]
LAYER_TYPES = [
    ["sliding_attention", "full_attention"] * 2,
    ["full_attention"] * 4,
    ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
]
ATTENTION = {"attention_bias": EITHER, "head_dim": [8, 16, 20]}
QWEN = {"use_sliding_window": EITHER, "sliding_window": WINDOWS, "max_window_layers": [0, 2, 4]}
MIXTURE = {"num_experts": [3, 6], "num_experts_per_tok": [1, 2], "moe_intermediate_size": [20]}
MIXTURE |= {"norm_topk_prob": EITHER, "mlp_only_layers": [[0], [1, 3], []]}
MIXTURE |= {"decoder_sparse_step": [1, 2]}
GRANITE = {"embedding_multiplier": [0.7, 1.5], "attention_multiplier": [0.2, 0.5]}
GRANITE |= {"residual_multiplier": [0.3, 1.2], "logits_scaling": [1.5, 3]}
HYBRID = {"attention_bias": EITHER, "linear_conv_kernel_dim": [2, 3, 4]}
HYBRID |= {"linear_num_key_heads": [1, 2], "linear_num_value_heads": [2, 4]}
RECURRENT_TYPES = [["full_attention", "linear_attention"] * 2, ["linear_attention"] * 4]
# model_type -> key -> its values. A file has a key or not; `ALWAYS` it has.
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "llama": {**ATTENTION, "mlp_bias": EITHER},
    "mistral": {"head_dim": [8, 20], "sliding_window": [None, *WINDOWS]},
    "qwen2": {**QWEN, "layer_types": LAYER_TYPES},
    "qwen3": {**ATTENTION, **QWEN, "layer_types": LAYER_TYPES},
    "qwen2_moe": {**MIXTURE, **QWEN, "qkv_bias": EITHER, "shared_expert_intermediate_size": [28]},
    "qwen3_moe": {**ATTENTION, **MIXTURE, "use_sliding_window": EITHER, "sliding_window": WINDOWS},
    "olmoe": {"num_experts": [3, 6], "norm_topk_prob": EITHER, "attention_bias": EITHER},
    "mixtral": {"head_dim": [8, 20], "sliding_window": [None, *WINDOWS]},
    "smollm3": {
        **{"attention_bias": EITHER, "mlp_bias": EITHER, "no_rope_layer_interval": [2, 3]},
        **{"no_rope_layers": [[1, 0, 0, 1], [0, 0, 0, 0]], "layer_types": LAYER_TYPES},
        **{"use_sliding_window": EITHER, "sliding_window": WINDOWS},
    },
    "granite": {**GRANITE, "attention_bias": EITHER, "mlp_bias": EITHER},
    "granitemoehybrid": {
        **GRANITE,
        **{"attention_bias": EITHER, "position_embedding_type": ["rope", None]},
    },
    "seed_oss": {**ATTENTION, "attention_out_bias": EITHER, "mlp_bias": EITHER},
    "olmo2": {"attention_bias": EITHER, "head_dim": [8]},
    "olmo3": {**{"attention_bias": EITHER, "sliding_window": WINDOWS, "layer_types": LAYER_TYPES}},
    "gemma3_text": {
        **{"attention_bias": EITHER, "sliding_window": WINDOWS, "layer_types": LAYER_TYPES},
        **{"query_pre_attn_scalar": [4, 50], "sliding_window_pattern": [2, 3]},
        **{"rope_local_base_freq": [77.0]},
    },
    "phi3": {"sliding_window": [None, *WINDOWS]},
    "glm4": {"head_dim": [8, 16], "attention_bias": EITHER},
    "glm4_moe": {
        **{"attention_bias": EITHER, "use_qk_norm": EITHER, "first_k_dense_replace": [0, 2, 4]},
        **{"n_shared_experts": [1, 2], "norm_topk_prob": EITHER, "n_group": [1, 2]},
        **{"topk_group": [1, 2], "routed_scaling_factor": [0.5, 2.0]},
    },
    "qwen3_5_text": {**HYBRID, "layer_types": RECURRENT_TYPES},
    "qwen3_5_moe_text": {**HYBRID, "num_experts": [3, 6], "full_attention_interval": [2, 3]},
    "qwen3_next": {**HYBRID, **MIXTURE},
    "gpt_oss": {
        **{"attention_bias": EITHER, "sliding_window": WINDOWS, "layer_types": LAYER_TYPES},
        **{"swiglu_limit": [0.5, 7.0]},
    },
    "ministral": {"head_dim": [8], "sliding_window": WINDOWS, "layer_types": LAYER_TYPES},
    "ministral3": {"sliding_window": [None, *WINDOWS]},
}
ALWAYS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"shared_expert_intermediate_size": 28},
    # Its default of 1 makes attention so sharp that fp32 itself is off by 1.7e-5.
    "granite": {"attention_multiplier": 0.3},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20},
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 52}
    | {"layer_types": ["attention"] * LAYERS, "mamba_n_heads": 4, "attention_multiplier": 0.3},
    "seed_oss": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 20},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}
    | {"intermediate_size": 20},
    "ministral3": {"head_dim": 16},
}
# The gated norm makes rounding of results near zero large; a large epsilon does not let it.
HYBRID_SIZES = {
    "rms_norm_eps": 0.05,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
HYBRID_SIZES |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
ALWAYS["qwen3_5_text"] = HYBRID_SIZES
for _kind in ("qwen3_5_moe_text", "qwen3_next"):
    ALWAYS[_kind] = HYBRID_SIZES | ALWAYS["qwen2_moe"]
NESTED = ("gemma3_text", "olmo3")
LESS_1 = ("gemma", "qwen3_5", "qwen3_next")
SHARES = ("phi3", "glm4", "glm4_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
SPELLINGS = ("old", "new", "both", "nested", "none")


def random_config(seed: int) -> tuple[str, dict[str, Any]]:
    """A model type and the content of its `config.json`."""
    rng = random.Random(seed)
    model_type = list(OPTIONS)[seed % len(OPTIONS)]
    heads = rng.choice([2, 4])
    config: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 64,
        "intermediate_size": 52,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([h for h in (1, 2, 4) if h <= heads]),
        "max_position_embeddings": rng.choice([16, 64, 128]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": rng.choice(EITHER),
        "pad_token_id": 0,
        **ALWAYS.get(model_type, {}),
    }
    for key, values in OPTIONS[model_type].items():
        if rng.random() < 0.6:
            config[key] = rng.choice(values)
    spelling = rng.choice(SPELLINGS)
    config |= rope_keys(rng, config, model_type, spelling, rng.choice(ROPES))
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return model_type, config


def rope_keys(
    rng: random.Random, config: dict[str, Any], model_type: str, spelling: str, kind: str
) -> dict[str, Any]:
    """Keys of a `config.json` that describe a rotary embedding of this kind in this spelling."""
    share = 1.0
    found: dict[str, Any] = {}
    if model_type in SHARES:
        share = {"phi3": 1.0, "glm4": 0.5, "glm4_moe": 0.5}.get(model_type, 0.25)
        if rng.random() < 0.5:
            share = found["partial_rotary_factor"] = rng.choice([0.5, 0.75])
    elif rng.random() < 0.1:
        found["partial_rotary_factor"] = 0.5
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if model_type == "phi3" and kind not in ("default", "longrope"):
        kind = rng.choice(["default", "longrope"])

    def rope(kind: str) -> dict[str, Any]:
        values = {"rope_type": kind, **_rope_values(rng, kind, int(head_dim * share) // 2)}
        if rng.random() < 0.7:
            values["rope_theta"] = rng.choice([50.0, 3000, 10000.0])
        if model_type == "ministral3":
            values |= {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16}
        return values

    def old() -> dict[str, Any]:
        values = rope(kind)
        name = rng.choice(["rope_type", "rope_type", "type"])
        return {name: values.pop("rope_type")} | values

    if rng.random() < 0.5:
        found["rope_theta"] = rng.choice([77.0, 20000, 500000.0])
    if rng.random() < 0.15:
        found["original_max_position_embeddings"] = rng.choice([8, 32, None])
    nested = {"full_attention": rope(kind), "sliding_attention": rope(rng.choice(ROPES))}
    if rng.random() < 0.2:
        nested["truncate"] = False
    flat = nested if model_type in NESTED else rope(kind)
    if spelling == "old":
        found["rope_scaling"] = old()
    elif spelling == "new":
        found["rope_parameters"] = flat
    elif spelling == "both":
        found |= {"rope_scaling": old(), "rope_parameters": flat}
    elif spelling == "nested":
        found["rope_parameters"] = nested
    return found


def _rope_values(rng: random.Random, kind: str, pairs: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if kind != "default":
        values["factor"] = rng.choice([1.0, 2, 4.0, 8.0])
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        values["factor"] = None
    if kind in ("yarn", "longrope", "llama3") and rng.random() < 0.7:
        values["original_max_position_embeddings"] = rng.choice([8, 16, 48])
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        values["attention_factor"] = rng.choice([0.7, 1.3])
    if kind == "llama3":
        values |= {
            "low_freq_factor": rng.choice([1, 1.5]),
            "high_freq_factor": rng.choice([2, 4.0]),
        }
    if kind == "longrope":
        values["short_factor"] = [1.0 + 0.1 * i for i in range(pairs)]
        values["long_factor"] = [1.5 + 0.5 * i for i in range(pairs)]
    if kind == "yarn":
        for key, some in (
            ("truncate", EITHER),
            ("beta_fast", [8, 32.0]),
            ("beta_slow", [1, 2.0]),
            ("mscale", [0.7, 1]),
            ("mscale_all_dim", [0.4, 0]),
        ):
            if rng.random() < 0.4:
                values[key] = rng.choice(some)
    return values


# ---- transformers and ours -----------------------------------------------------------------------


def randomize(model: PreTrainedModel) -> None:
    """Random norms and biases, so that none can be left out, and weights of about unit gain."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith((".bias", "_bias")):
                parameter.normal_(std=0.3)
            elif parameter.ndim == 1:  # some checkpoints hold the difference from 1
                less = model.config.model_type.startswith(LESS_1) and "linear_attn" not in key
                parameter.uniform_(0.5, 1.5).sub_(int(less))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)


# model_type -> what transformers renames as it reads files, and the name there.
IN_FILES = {"mixtral": (".mlp.", ".block_sparse_moe.")}


def with_our_names(theirs: dict[str, Any], model_type: str) -> dict[str, Any]:
    """transformers' tensors: those of experts, with three dimensions, as rows; and names as in
    files."""
    rows: dict[str, Tensor] = {}
    for key, value in theirs.items():
        if key.endswith("_proj_bias"):
            rows[key.removesuffix("_bias") + ".bias"] = value.flatten()
        elif value.ndim == 3 and ".experts." in key:  # gpt-oss multiplies from the other side
            matrices = value.mT if model_type == "gpt_oss" else value
            rows[f"{key}.weight"] = matrices.flatten(0, 1)
        else:
            rows[key] = value
    in_files = IN_FILES.get(model_type, ("", ""))
    return {key.replace(*in_files): value for key, value in rows.items()}


@torch.no_grad()
def compare(
    model_type: str, config: dict[str, Any], lengths: tuple[int, ...] = (SEQ,)
) -> tuple[str, Any]:
    """What becomes of a `config.json`, in rows of these lengths.

    Returns:
        ("equal", largest difference of logits), ("refused", our error), ("differs", the
        difference), or ("no oracle", transformers' error), where transformers computes nothing.
        Equal is 1e-5 in fp32 or, where the order of sums alone makes more (1.09e-5 on a Zen 3 for
        seed 72, with logits of 2.7), 1e-5 in fp64.

    Raises:
        Exception: ours, except for a `UserError` of one line.
    """
    generator = torch.manual_seed(1)
    rows = [torch.randint(1, config["vocab_size"], (1, n), generator=generator) for n in lengths]
    try:
        mine = DecoderConfig.from_dict(copy.deepcopy(config))
    except UserError as error:
        assert "\n" not in str(error)
        return "refused", str(error)
    torch.manual_seed(0)
    try:
        theirs = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config))
        model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
        randomize(model)
        expected = [model(tokens).logits for tokens in rows]
    except Exception as error:
        return "no oracle", f"{type(error).__name__}: {str(error).splitlines()[-1]:.100}"
    decoder = Decoder(mine)
    decoder.load_state_dict(with_our_names(model.state_dict(), model_type), strict=True)
    difference = _difference(decoder, rows, expected)
    if difference > 1e-5:
        exact = [model.double()(tokens).logits for tokens in rows]
        difference = _difference(decoder.double(), rows, exact)
    return ("equal" if difference <= 1e-5 else "differs"), difference


def _difference(decoder: Decoder, rows: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of logits."""
    pairs = zip(rows, expected, strict=True)
    return max((decoder(row) - logits).abs().max().item() for row, logits in pairs)


def main(count: int = 400, first: int = 0) -> None:
    logging.disable(logging.WARNING)
    counts, worst = Counter[str](), 0.0
    for seed in range(first, first + count):
        model_type, config = random_config(seed)
        try:
            outcome, what = compare(model_type, config)
        except Exception as error:
            outcome, what = "crash", repr(error)
        counts[outcome] += 1
        if outcome == "equal":
            worst = max(worst, what)
        elif outcome in ("differs", "crash"):
            ropes = {key: value for key, value in config.items() if "rope" in key or "rot" in key}
            print(f"seed {seed} {model_type}: {outcome} {what}; {ropes}")
        else:
            counts[f"{outcome}: {str(what)[:110]}"] += 1
    print(f"largest difference of equal ones {worst:.1e}")
    for outcome, times in counts.most_common():
        print(f"{times:5d} {outcome}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
