"""Keys of preference tuning in TRL, Axolotl and LLaMA-Factory, and ours for them.

The answers are those of `qfsdp.config.foreign_keys`.
"""

from __future__ import annotations

_DPO = "preference tuning is recipes/dpo_distributed; its 'loss' says which"
_LOSSES = {
    "sigmoid": "loss._component_=sigmoid",
    **{name: f"loss._component_={name}" for name in ("robust", "ipo", "hinge")},
    **{name: f"loss._component_={name}" for name in ("simpo", "orpo", "kto")},
    "": "loss._component_",
}
_REFERENCE = "there is no second model; 'reference' is base (adapters off), start or none"
_MIX = "'loss' may be a list that mixes losses, each with its weight; sft is one of them"
_CUT = "'max_seq_len' is of a prompt with its answer; docs/guide/your-data.md says what is cut"
_LOOP = "a loop of your own does it: docs/guide/your-own-loop.md"

PREFERENCES: dict[str, str | dict[str, str]] = {
    **dict.fromkeys(("beta", "dpo_beta", "pref_beta", "rl_beta"), "loss.beta"),
    **dict.fromkeys(("dpo_label_smoothing", "label_smoothing"), "loss.label_smoothing"),
    **dict.fromkeys(
        ("desirable_weight", "kto_chosen_weight", "kto_desirable_weight"), "loss.desirable_weight"
    ),
    **dict.fromkeys(
        ("kto_rejected_weight", "kto_undesirable_weight", "undesirable_weight"),
        "loss.undesirable_weight",
    ),
    **dict.fromkeys(("loss_type", "pref_loss"), _LOSSES),
    **dict.fromkeys(("cpo_alpha", "pref_ftx", "rpo_alpha", "loss_weights"), _MIX),
    **dict.fromkeys(("max_completion_length", "max_prompt_length", "truncation_mode"), _CUT),
    **dict.fromkeys(
        ("model_adapter_name", "ref_adapter_name", "ref_checkpointer", "ref_model"), _REFERENCE
    ),
    **dict.fromkeys(("ref_model_mixup_alpha", "sync_ref_model"), _REFERENCE),
    **dict.fromkeys(("num_generations", "reward_funcs", "reward_model"), _LOOP),
    "orpo_alpha": "loss.beta",
    "precompute_ref_log_probs": "reference_logprobs=cache",
    "reference_free": "'reference=none' is for losses without one, simpo and orpo",
    "rl": {"grpo": _LOOP, "": _DPO},
    "simpo_gamma": "loss.gamma",
    "stage": {
        **dict.fromkeys(("dpo", "kto"), _DPO),
        "ppo": _LOOP,
        "": "the recipe says what is done; remove the key",
    },
}
