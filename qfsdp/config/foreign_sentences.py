"""Keys of other projects that have no counterpart here, and what is said about them."""

from __future__ import annotations

_NOT_BUILT = "qfsdp does not have it; remove the key"
_KERNELS = "qfsdp's own kernels and its loss in chunks are always used; remove the key"
_ATTENTION = "attention is PyTorch's fused one wherever it can be; remove the key"
_FSDP = "all training is FSDP2; 'sharding.strategy' and its neighbours say how"
_VOCABULARY = "the vocabulary stays as the tokenizer's files say; remove the key"
_DISTILLED = "there is no distillation from a second model; remove the key"
_MODEL_SAYS = "config.json of 'model.path' says it; remove the key"
_SHUFFLED = "samples are always shuffled, by 'seed'; remove the key"
_TARGETS_OF = "'adapter.targets' is one list of names, or all-linear"
_HELD_OUT = "held-out sets are named: 'validation.sets.NAME={_component_: ..., split: train[95%:]}'"
_RANKS = "a flag before the recipe gives the ranks: tune run --nproc_per_node N RECIPE ..."
_ALWAYS = "it is always so; remove the key"
_RUNS = "the recipe says what is done; remove the key"
_WARMUP = "a share is not known here; 'lr_scheduler.num_warmup_steps' is a number of updates"

_KEYS = {  # sentence -> keys, of any project, that it answers
    _NOT_BUILT: (
        "alpha_pattern context_parallel_size cosine_min_lr_ratio cudnn_deterministic_mode "
        "dataset_exact_deduplication debug enable_thinking eval_accumulation_steps eval_delay "
        "eval_max_new_tokens eval_table_size exclude_modules fast_inference "
        "gpu_memory_utilization label_smoothing_factor max_lora_rank use_exact_model_name "
        "layers_pattern layers_to_transform log_level lora_on_cpu loraplus_lr_embedding "
        "media_dir neftune_noise_alpha noisy_embedding_alpha pissa_init shift_attn strict "
        "tensor_parallel_dim tensor_parallel_plan tensor_parallel_size torch_compile_backend "
        "torch_compile_mode use_badam use_galore wandb_watch"
    ),
    _KERNELS: (
        "cut_cross_entropy enable_liger_kernel liger_glu_activation liger_rms_norm "
        "lora_mlp_kernel lora_o_kernel lora_qkv_kernel plugins use_liger_kernel use_unsloth"
    ),
    _ATTENTION: (
        "attn_implementation eager_attention flash_attention flash_attn flex_attention "
        "sdp_attention xformers_attention"
    ),
    _FSDP: "deepspeed fsdp fsdp_config fsdp_version",
    _VOCABULARY: "additional_target new_special_tokens resize_vocab tokens",
    _DISTILLED: "kd_loss kd_ratio teacher_checkpointer teacher_model",
    _MODEL_SAYS: ("checkpointer.model_type model_type overrides_of_model_config rope_scaling"),
    _SHUFFLED: "shuffle shuffle_merged_datasets",
    _TARGETS_OF: (
        "apply_lora_to_mlp apply_lora_to_output lora_attn_modules model.apply_lora_to_mlp "
        "model.apply_lora_to_output model.lora_attn_modules"
    ),
    _HELD_OUT: "val_set_size val_size",
    _RANKS: "device_map local_rank",
    _ALWAYS: "ddp_find_unused_parameters include_tokens_per_second logging_first_step",
    _RUNS: "do_eval do_train",
    _WARMUP: "warmup_ratio",
}
SENTENCES = {key: sentence for sentence, keys in _KEYS.items() for key in keys.split()}
