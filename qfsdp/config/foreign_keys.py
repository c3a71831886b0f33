"""Keys of torchtune, Axolotl, LLaMA-Factory, Unsloth, HF Trainer, TRL and PEFT, and ours for them.

An answer is one of

    "adapter.rank"                       the key; its value stays
    "activation.checkpointing=full"      the key and its value; after `false`, the value of `_OFF`
    "warmup is in updates; ..."          a sentence (it has spaces): there is no such key here
    {"lora": "...", "": "..."}           an answer for each value, and for all others

`tests/cli/test_foreign_keys.py` checks that every key of an answer exists, and takes the value.
"""

from __future__ import annotations

from typing import Any

from qfsdp.config.foreign_sentences import SENTENCES
from qfsdp.config.preference_keys import PREFERENCES

Answer = str | dict[str, str]

_LOGGER = "metric_logger._component_=torchtune.training.metric_logging"
_LOGGERS = {
    "wandb": f"{_LOGGER}.WandBLogger",
    "comet_ml": f"{_LOGGER}.CometLogger",
    "tensorboard": f"{_LOGGER}.TensorBoardLogger",
    "none": "metric_logger=null",
    "": "metric_logger._component_",
}
_OPTIMIZERS = {
    "adamw_torch": "optimizer._component_=torch.optim.AdamW",
    "adamw_torch_fused": "optimizer._component_=torch.optim.AdamW",
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
        "optimizer._component_=torchao.optim.AdamW8bit",
    ),
    "": "optimizer._component_",
}
_METHODS = {
    "lora": "adapter.method=lora",
    "qlora": "adapter.method=lora",
    "dora": "adapter.method=dora",
    "full": "full finetuning is recipes/full_finetune_distributed",
    "freeze": "chosen layers are trained by recipes/full_finetune_distributed",
    "": "adapter.method",
}
_NOT_8_BIT = "weights have 4 bits or 16: 'quantization.format=nf4' or none"

TORCHTUNE: dict[str, Answer] = {
    "batch_size_val": "validation.batch_size",
    "checkpointer": "model.path",
    "checkpointer._component_": "every checkpoint format is recognized; 'model.path' is the folder",
    "checkpointer.adapter_checkpoint": "adapter.start_from",
    "checkpointer.checkpoint_dir": "model.path",
    "checkpointer.checkpoint_files": "all files of 'model.path' are read; remove the key",
    "checkpointer.output_dir": "output_dir",
    "checkpointer.recipe_checkpoint": "resume",
    "collate_fn": "the loader pads or packs by itself; remove the key",
    "custom_sharded_layers": "sharding.wrap",
    "data_parallel_replicate_dim": "sharding.replicate",
    "data_parallel_shard_dim": "sharding.shard",
    "dataset.packed": "packed",
    "dataset_val": "validation.sets",
    "device": "an accelerator is used wherever there is one; remove the key",
    "dtype": "model.dtype",
    "enable_activation_checkpointing": "activation.checkpointing=full",
    "enable_activation_offloading": "activation.offload",
    "enable_async_checkpointing": "checkpoint.asynchronous",
    "fsdp_cpu_offload": "sharding.cpu_offload",
    "fsdp_reshard_after_forward": "sharding.strategy=full_shard",
    "fsdp_sharding_strategy": "sharding.strategy",
    "log_peak_memory_stats": "peak memory is always logged; remove the key",
    "low_cpu_ram": "a rank reads only its share; remove the key",
    "loss": "the loss is always cross entropy over the targets, in chunks; remove the key",
    "max_steps_per_epoch": "max_steps",
    "model._component_": "model.path",
    "model.lora_alpha": "adapter.alpha",
    "model.lora_dropout": "adapter.dropout",
    "model.lora_rank": "adapter.rank",
    "model.quantize_base": "quantization.format=nf4",
    "model.use_dora": "adapter.method=dora",
    "optimizer_in_bwd": "optimizer_in_backward",
    "profiler._component_": "'profiler.steps' is a list of updates, e.g. [5, 6]",
    "profiler.active_steps": "'profiler.steps' is a list of updates, e.g. [5, 6]",
    "profiler.enabled": "'profiler.steps' is a list of updates, e.g. [5]; an empty one is off",
    "profiler.profile_memory": "profiler.memory",
    "profiler.output_dir": "traces lie in output_dir; remove the key",
    "profiler.with_stack": "profiler.stacks",
    "quantizer": "quantization.format",
    "run_val_every_n_steps": "validation.eval_every",
    "save_adapter_weights_only": "the adapter is always saved by itself, and a base never",
    "tokenizer.prompt_template": "tokenizer.chat_template",
}

PEFT: dict[str, Answer] = {
    "bias": "biases are never trained; remove the key",
    "bnb_4bit_compute_dtype": "model.dtype",
    "bnb_4bit_quant_storage": "weights are always stored as bytes; remove the key",
    "bnb_4bit_quant_type": {
        "nf4": "quantization.format=nf4",
        "fp4": "quantization.format=nf4",
        "": "quantization.format",
    },
    "bnb_4bit_use_double_quant": "quantization.format=nf4",
    "fan_in_fan_out": "the model's code knows it; remove the key",
    "inference_mode": "training and generation know it; remove the key",
    "init_lora_weights": {"loftq": "adapter.init=loftq", "": "adapter.init=default"},
    "load_in_4bit": "quantization.format=nf4",
    "load_in_8bit": _NOT_8_BIT,
    "loftq_config": "adapter.init=loftq",
    "lora_alpha": "adapter.alpha",
    "lora_bias": "biases are never trained; remove the key",
    "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_target": "adapter.targets",
    "lora_target_linear": "adapter.targets=all-linear",
    "lora_target_modules": "adapter.targets",
    "modules_to_save": "adapters train no whole weights; 'adapter.targets' may name lm_head",
    "peft_type": {"LORA": "adapter.method=lora", "IA3": "adapter.method=ia3", "": "adapter.method"},
    "r": "adapter.rank",
    "rank_pattern": "experts may have another rank, 'adapter.expert_rank'; others may not",
    "target_modules": "adapter.targets",
    "target_parameters": "experts are targets by their names in 'adapter.targets'",
    "task_type": "qfsdp trains causal language models only; remove the key",
    "use_dora": "adapter.method=dora",
    "use_rslora": "adapter.rslora",
}

HF_TRAINER: dict[str, Answer] = {
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "assistant_only_loss": "the loss is on answers only; 'dataset.train_on_input=true' changes it",
    **dict.fromkeys(
        ("average_tokens_across_devices", "include_num_input_tokens_seen"),
        "losses and tokens are always counted over all ranks; remove the key",
    ),
    "auto_find_batch_size": "recipes/find_fit finds the batch size that fits",
    "bf16": "model.dtype=bf16",
    "completion_only_loss": "the loss is on answers only; 'dataset.train_on_input=true' changes it",
    "data_seed": "seed",
    "chat_template_path": "tokenizer.chat_template",
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory"),
        "the loader needs no processes of its own; remove the key",
    ),
    "dataloader_drop_last": "every sample is used; the last step of an epoch may be smaller",
    "dataset_config": "dataset.subset",
    "dataset_name": "dataset.source",
    "dataset_num_proc": "dataset.processes",
    "dataset_text_field": "dataset.text_column",
    "dataset_train_split": "dataset.split",
    "ddp_timeout": "distributed.timeout",
    "disable_tqdm": "there is a bar on a terminal only; remove the key",
    "early_stopping_patience": "validation.patience",
    "eval_batch_size": "validation.batch_size",
    "eval_dataset": "validation.sets",
    "eval_on_start": "validation.at_start",
    "eval_packing": "validation has no packing; remove the key",
    "eval_steps": "validation.eval_every",
    "eval_strategy": "'validation.eval_every' is a number of updates",
    "evaluation_strategy": "'validation.eval_every' is a number of updates",
    "fp16": "model.dtype=fp16",
    "gradient_checkpointing": "activation.checkpointing=full",
    "full_determinism": "a run is a function of its config, bit for bit; remove the key",
    "gradient_checkpointing_kwargs": "checkpointing is never reentrant; remove the key",
    "greater_is_better": "the metric says which way is better; remove the key",
    "group_by_length": "'packed=true' avoids padding; remove the key",
    "hub_model_id": "push_to_hub",
    "hub_private_repo": "a new repository is always private; remove the key",
    "hub_strategy": "the result is uploaded once, after the run; remove the key",
    "hub_token": "the hub's token is read from HF_TOKEN; remove the key",
    "learning_rate": "optimizer.lr",
    "load_best_model_at_end": "validation.keep_best",
    "logging_dir": "metric_logger.log_dir",
    "logging_strategy": "'log_every_n_steps' is a number of updates",
    "logging_steps": "log_every_n_steps",
    "lr": "optimizer.lr",
    "lr_scheduler_type": {
        "cosine": "lr_scheduler._component_=qfsdp.training.cosine_with_warmup",
        "constant": "lr_scheduler=null",
        "": "lr_scheduler._component_",
    },
    "max_grad_norm": "clip_grad_norm",
    "max_length": "max_seq_len",
    "max_seq_length": "max_seq_len",
    "metric_for_best_model": "'validation.metric' names the set whose loss decides",
    "model": "model.path",
    "model_id": "model.path",
    "model_init_kwargs": "'model.dtype' is its only argument here",
    "model_max_length": "max_seq_len",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_train_epochs": "epochs",
    "optim": _OPTIMIZERS,
    "optim_args": "arguments stand in the section itself: 'optimizer.ARGUMENT'",
    "overwrite_output_dir": "a run never overwrites another; 'resume=auto' goes on with one",
    "packing": "packed",
    "pad_token": "config.json and the tokenizer's files say it; remove the key",
    "padding_free": "packed",
    "per_device_eval_batch_size": "validation.batch_size",
    "per_device_train_batch_size": "batch_size",
    "remove_unused_columns": "a dataset reads the columns that it names; remove the key",
    "report_to": _LOGGERS,
    "resume_from_checkpoint": {"true": "resume=auto", "false": "resume=null", "": "resume"},
    "run_name": "metric_logger.name",
    "save_only_model": "the adapter is always saved by itself; remove the key",
    "save_safetensors": "all weights are safetensors; remove the key",
    "save_steps": "checkpoint.every_n_steps",
    "save_strategy": "'checkpoint.every_n_steps' or 'checkpoint.every_minutes' say when",
    "save_total_limit": "checkpoint.keep_last",
    "tf32": "products of bf16 weights need no TF32; remove the key",
    "tokenizer_name": "tokenizer.path",
    "torch_compile": "compile",
    "torch_dtype": "model.dtype",
    "train_batch_size": "batch_size",
    "trust_remote_code": "qfsdp runs no code that comes with a model; remove the key",
    "use_peft": "the recipe says what is trained; remove the key",
    "use_cpu": "an accelerator is used wherever there is one; CUDA_VISIBLE_DEVICES= hides them",
    "warmup_steps": "lr_scheduler.num_warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}

AXOLOTL: dict[str, Answer] = {
    "activation_offloading": "activation.offload",
    "adapter": _METHODS,
    "auto_resume_from_checkpoints": "resume=auto",
    "base_model": "model.path",
    "base_model_config": "config.json of 'model.path' is read; remove the key",
    "chat_template": "tokenizer.chat_template",
    "comet_project_name": "metric_logger.project",
    "dataset_prepared_path": "dataset.tokenized_cache",
    "datasets": "'dataset' is one; several are qfsdp.data.mixed_dataset with 'dataset.sets'",
    "dataset_processes": "dataset.processes",
    "dp_replicate_size": "sharding.replicate",
    "dp_shard_size": "sharding.shard",
    "eval_sample_packing": "validation has no packing; remove the key",
    "evals_per_epoch": "'validation.eval_every' is a number of updates",
    "gpu_memory_limit": "device_memory",
    "lora_fan_in_fan_out": "the model's code knows it; remove the key",
    "lora_model_dir": "adapter.start_from",
    "lora_modules_to_save": "adapters train no whole weights; 'adapter.targets' may name lm_head",
    "loraplus_lr_ratio": "adapter.lora_plus_ratio",
    "lr_scheduler_kwargs": "arguments stand in the section itself: 'lr_scheduler.ARGUMENT'",
    "micro_batch_size": "batch_size",
    "mlflow_experiment_name": "metric_logger.experiment_name",
    "mlflow_tracking_uri": "metric_logger.tracking_uri",
    "num_epochs": "epochs",
    "pad_to_sequence_len": "'packed=true' fills rows of max_seq_len; remove the key",
    "peft_use_dora": "adapter.method=dora",
    "peft_use_rslora": "adapter.rslora",
    "sample_packing": "packed",
    "saves_per_epoch": "'checkpoint.every_n_steps' is a number of updates",
    "sequence_len": "max_seq_len",
    "special_tokens": "the tokenizer's files say them; remove the key",
    "streaming": "dataset.streaming",
    "test_datasets": "validation.sets",
    "tokenizer_config": "tokenizer.path",
    "tokenizer_type": "the tokenizer's files say it; remove the key",
    "train_on_inputs": "dataset.train_on_input",
    "unfrozen_parameters": "'trainable.layers' of recipes/full_finetune_distributed says which",
    "use_comet": f"{_LOGGER}.CometLogger",
    "use_mlflow": f"{_LOGGER}.MLFlowLogger",
    "use_wandb": f"{_LOGGER}.WandBLogger",
    "wandb_entity": "metric_logger.entity",
    "wandb_log_model": "adapters and models are files in output_dir; remove the key",
    "wandb_name": "metric_logger.name",
    "wandb_project": "metric_logger.project",
    "wandb_run_id": "metric_logger.id",
}

LLAMA_FACTORY: dict[str, Answer] = {
    "adapter_name_or_path": "adapter.start_from",
    "create_new_adapter": "merge the first adapter (recipes/merge), then train on; remove the key",
    "cutoff_len": "max_seq_len",
    "dataset_dir": "dataset.source",
    "default_system": "dataset.system_prompt",
    "disable_gradient_checkpointing": {
        "true": "activation.checkpointing=none",
        "": "activation.checkpointing=full",
    },
    "double_quantization": "quantization.format=nf4",
    "finetuning_type": _METHODS,
    "freeze_trainable_layers": "trainable.layers",
    "low_cpu_mem_usage": "a rank reads only its share; remove the key",
    "mask_history": "all answers of a chat are targets; remove the key",
    "max_samples": "dataset.max_rows",
    **dict.fromkeys(
        ("interleave_probs", "mix_strategy"),
        "qfsdp.data.mixed_dataset mixes data sets; 'dataset.weights' says how much of each",
    ),
    "neat_packing": "packed",
    "overwrite_cache": "tokens are kept by what they were made from; remove the key",
    "plot_loss": "metrics.jsonl in output_dir has all losses; remove the key",
    "preprocessing_num_workers": "dataset.processes",
    "quantization_bit": {"4": "quantization.format=nf4", "": _NOT_8_BIT},
    "quantization_method": "'quantization.format' is nf4, nf4_fp32_absmax, hqq, mxfp4 or none",
    "template": "tokenizer.chat_template",
    "tokenized_path": "dataset.tokenized_cache",
    "train_on_prompt": "dataset.train_on_input",
    "upcast_layernorm": "norms are computed in fp32; remove the key",
    "use_llama_pro": "Llama-Pro is recipes/block_expansion and configs/llama3_8b_llama_pro.yaml",
    "use_swanlab": "metric_logger._component_",
}

UNSLOTH: dict[str, Answer] = {
    "full_finetuning": "full finetuning is recipes/full_finetune_distributed",
    "random_state": "seed",
    "token": "the hub's token is read from HF_TOKEN; remove the key",
    "use_gradient_checkpointing": {
        "false": "activation.checkpointing=none",
        "": "activation.checkpointing=full",
    },
}

ANSWERS = (
    SENTENCES | TORCHTUNE | PEFT | HF_TRAINER | AXOLOTL | LLAMA_FACTORY | UNSLOTH | PREFERENCES
)
_OFF = {  # what `false` of a foreign key means for ours
    "activation.checkpointing": "none",
    "adapter.init": "default",
    "adapter.method": "lora",
    "adapter.targets": "null",
    "model.dtype": "fp32",
    "quantization.format": "none",
    "reference_logprobs": "live",
    "resume": "null",
    "sharding.strategy": "shard_grad_op",
}
_OFF_OF = {  # where it means something else
    "bnb_4bit_use_double_quant": "quantization.format=nf4_fp32_absmax",
    "double_quantization": "quantization.format=nf4_fp32_absmax",
    **dict.fromkeys(("use_comet", "use_mlflow", "use_wandb"), "metric_logger=null"),
}


def answer_to(key: str, value: Any = None) -> str:
    """What qfsdp has for another project's key: a key, "key=value", or a sentence; "" if unknown.

    Args:
        key: with its sections, such as "model.lora_rank"; a last name alone is known too.
        value: that it was given.
    """
    if isinstance(value, dict) and len(value) == 1 and f"{key}.{next(iter(value))}" in ANSWERS:
        return answer_to(f"{key}.{next(iter(value))}", *value.values())
    found = ANSWERS.get(key, "")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(found, dict):
        found = found.get(text, found[""])
    ours, given, _ = found.partition("=")
    if value is False and given and " " not in found:
        return _OFF_OF.get(key) or f"{ours}={_OFF.get(ours, 'null')}"
    return found


def in_words(answer: str, has_it: bool = True) -> str:
    """An answer as the end of a message; `has_it`: whether the recipe has its key."""
    if not answer or " " in answer:
        return answer and f"; {answer}"
    return f"; here it is '{answer}'" + ("" if has_it else ", which this recipe does not have")
