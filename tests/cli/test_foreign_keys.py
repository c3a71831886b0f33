"""Keys of other projects: every answer exists here and is what a user can write."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component, passed_by_name
from qfsdp.config.convert import has_key
from qfsdp.config.foreign_keys import answer_to, foreign_keys
from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import load_recipe
from qfsdp.data.reading import KEYS
from qfsdp.launch.start import check_recipe
from tests.cli.stand_in import ROOT

QDORA = load_recipe(ROOT / "recipes/qdora_distributed.py").Config
FULL = load_recipe(ROOT / "recipes/full_finetune_distributed.py").Config
DPO = load_recipe(ROOT / "recipes/dpo_distributed.py").Config
REWARD = load_recipe(ROOT / "recipes/reward_distributed.py").Config
CONFIGS = {
    QDORA: "configs/llama3_8b_qdora.yaml",
    FULL: "configs/llama3_8b_full.yaml",
    DPO: "configs/llama3_8b_dpo.yaml",
    REWARD: "configs/smollm2_135m_reward.yaml",
}
LOSS = "qfsdp.training.preference_losses"
# A component that takes the arguments that answers name.
EXAMPLES = {
    "optimizer": ["torch.optim.AdamW"],
    "lr_scheduler": ["qfsdp.training.cosine_with_warmup"],
    "tokenizer": ["qfsdp.data.hf_tokenizer"],
    "dataset": [
        "qfsdp.data.instruct_dataset",
        "qfsdp.data.chat_dataset",
        "qfsdp.data.text_dataset",
        "qfsdp.data.mixed_dataset",
    ],
    "loss": [f"{LOSS}.sigmoid", f"{LOSS}.simpo", f"{LOSS}.kto"],
    "metric_logger": [
        "torchtune.training.metric_logging.TensorBoardLogger",
        "torchtune.training.metric_logging.WandBLogger",
        "torchtune.training.metric_logging.MLFlowLogger",
    ],
}
TO_WANDB_INIT = ("name", "id")  # WandBLogger passes them on


def answers() -> list[str]:
    found: list[str] = []
    for answer in foreign_keys().answers.values():
        found += answer.values() if isinstance(answer, dict) else [answer]
    found += [answer_to(key, False) for key in foreign_keys().answers]
    return sorted({answer for answer in found if " " not in answer})


def load(schema: type, word: str) -> object:
    return load_config(schema, ["--config", str(ROOT / CONFIGS[schema]), word])


@pytest.mark.parametrize("answer", answers())
def test_the_key_of_an_answer_exists_and_takes_its_value(answer: str) -> None:
    key, given, _ = answer.partition("=")
    schema = next(schema for schema in CONFIGS if has_key(schema, key))
    section, _, argument = key.partition(".")
    if section in EXAMPLES and argument not in ("", "_component_"):
        takes = [passed_by_name(Component(path).resolve()) for path in EXAMPLES[section]]
        also = [*TO_WANDB_INIT, *KEYS]  # the last are taken before the builder is called
        assert any(argument in names for names in takes) or argument in also
    if not given:
        return
    load(schema, answer)
    if argument == "_component_":
        module, _, name = answer.partition("=")[2].rpartition(".")
        assert hasattr(importlib.import_module(module or LOSS), name)


@pytest.mark.parametrize("key", sorted(foreign_keys().answers))
def test_every_key_has_an_answer_of_one_line(key: str) -> None:
    for value in (None, True, False, "nf4", "lora", 4):
        answer = answer_to(key, value)
        assert answer and "\n" not in answer
        ours = answer.partition("=")[0]
        assert ours != key or "=" in answer, "a key that we have is not foreign"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rate=2e-4", "unknown key 'learning_rate'; here it is 'optimizer.lr'"),
        ("lora_r=8", "unknown key 'lora_r'; here it is 'adapter.rank'"),
        (
            "gradient_checkpointing=true",
            "unknown key 'gradient_checkpointing'; here it is 'activation.checkpointing=full'",
        ),
        (
            "gradient_checkpointing=false",
            "unknown key 'gradient_checkpointing'; here it is 'activation.checkpointing=none'",
        ),
        ("model.lora_rank=8", "unknown key 'model.lora_rank'; here it is 'adapter.rank'"),
        ("checkpointer.checkpoint_dir=x", "unknown key 'checkpointer'; here it is 'model.path'"),
        ("model.pretrained_model_name_or_path=x", "here it is 'model.path'"),
        ("distributed.cp_size=2", "here it is 'sharding.context_parallel'"),
        ("checkpoint.checkpoint_dir=x", "here it is 'output_dir'"),
        ("checkpointer.output_dir=x", "unknown key 'checkpointer'; here it is 'output_dir'"),
        ("adapter=qlora", "here it is 'adapter.method=lora'"),
        ("model=org/name", "here it is 'model.path'"),
        ("resume_from_checkpoint=true", "here it is 'resume=auto'"),
        ("resume_from_checkpoint=runs/x", "here it is 'resume'"),
        ("training.lora_r=8", "unknown key 'training'"),
        ("adapter.r=8", "unknown key 'adapter.r'; here it is 'adapter.rank'"),
        (
            "optimizer_in_bwd=true",
            "here it is 'optimizer_in_backward', which this recipe does not have",
        ),
        ("rl=dpo", "unknown key 'rl'; preference tuning is recipes/dpo_distributed; its 'loss'"),
        ("rl=grpo", "unknown key 'rl'; a loop of your own does it: docs/guide/your-own-loop.md"),
        ("mask_history=true", "here it is 'dataset.train_on_last_turn_only=true'"),
        ("mask_history=false", "all answers of a chat are targets"),
        ("torch_dtype=bfloat16", "here it is 'model.dtype=bf16'"),
        ("full_finetuning=false", "the recipe says what is trained; remove the key"),
        ("fp16=null", "unknown key 'fp16'; here it is 'model.dtype'"),
        ("fp16=false", "'model.dtype' is bf16, fp16 or fp32; remove the key"),
        ("loftq_config=null", "here it is 'adapter.init'"),
        ("loftq_config={}", "here it is 'adapter.init'"),
        ("pissa_init=true", "here it is 'adapter.init=pissa'"),
        ("init_lora_weights=gaussian", "'adapter.init' is default, loftq, pissa or olora"),
        ("lora_target=all", "here it is 'adapter.targets=all-linear'"),
        ("lora_target_linear=false", "'adapter.targets' names the linears; remove the key"),
        ("lora_target_linear=null", "'adapter.targets' names the linears; remove the key"),
        ("max_steps_per_epoch=9", "'max_steps' is of the whole run, not of an epoch"),
        ("profiler.warmup_steps=5", "a trace has what PyTorch's profiler records by itself"),
        ("finetuning_type=lora", "with 'quantization.format=none' for a base in 16 bits"),
        ("beta=0.1", "unknown key 'beta'; here it is 'loss.beta', which this recipe does not have"),
    ],
)
def test_messages(word: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load(QDORA, word)
    answer = str(error.value)
    assert message in answer and "\n" not in answer and (word != "fp16=null" or "=fp" not in answer)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("lr_scheduler=cosine", "'lr_scheduler._component_=qfsdp.training.cosine_with_warmup'"),
        ("optimizer=adamw_bnb_8bit", "'optimizer._component_=torchao.optim.AdamW8bit'"),
        ("optimizer=lion", "'optimizer' is a class such as torch.optim.AdamW"),
        ("metric_logger=wandb", "'metric_logger._component_=torchtune."),
    ],
)
def test_names_of_other_projects_in_the_place_of_an_import_path(word: str, answer: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(UserError, match=f"does not exist; .*{answer}"):
        getattr(load(QDORA, word), key).resolve(key)


def test_a_whole_config_of_another_project_is_told_at_once(tmp_path: Path) -> None:
    """Its keys, the section that is a word there, and an override, which a value refers to."""
    file = tmp_path / "axolotl.yml"
    file.write_text(
        "base_model: org/name\nadapter: qlora\nlora_r: 8\nmodel: {hidden: 1}\n"
        "output_dir: runs/${adapter.rank}\n"
    )
    with pytest.raises(UserError) as error:
        load_config(QDORA, ["--config", str(file), "micro_batch_size=2"])
    lines = str(error.value).splitlines()
    assert lines[0] == "unknown key 'base_model'; here it is 'model.path'"
    for line in (
        "unknown key 'lora_r'; here it is 'adapter.rank'",
        "unknown key 'micro_batch_size'; here it is 'batch_size'",
    ):
        assert line in lines
    assert any(line.startswith("unknown key 'model.hidden'") for line in lines)
    assert any(line.startswith("adapter: 'qlora' is not valid") for line in lines)
    assert len(lines) == 5


def test_wrong_values_are_told_at_once() -> None:
    words = ["batch_size=two", "adapter.rank=r", "epochs=3.0", "compile=4"]
    with pytest.raises(UserError) as error:
        load_config(QDORA, ["--config", str(ROOT / CONFIGS[QDORA]), *words])
    keys = {line.partition(":")[0] for line in str(error.value).splitlines()}
    assert keys == {"batch_size", "adapter.rank", "epochs", "compile"}


def test_names_values_and_arguments_are_told_at_once(tmp_path: Path) -> None:
    """They were told at three starts."""
    arguments = ["optimizer.lr=x", "optimizer.foo=3", "lr_scheduler.num_warmup_steps=0.1"]
    words = ["--config", str(ROOT / CONFIGS[QDORA]), f"output_dir={tmp_path}", *arguments]
    with pytest.raises(UserError) as error:
        load_config(QDORA, [*words, "adapter.rnk=8", "epochs=3.0"])
    lines = str(error.value).splitlines()
    heads = ["unknown key 'adapter.rnk'", "epochs: 3.0 is not valid", "optimizer.lr: 'x' is not"]
    heads += ["optimizer.foo: 'torch.optim.AdamW'", "lr_scheduler.num_warmup_steps: 0.1 is not"]
    assert len(lines) == 5 and all(map(str.startswith, lines, heads)), lines
    with pytest.raises(UserError) as error:
        check_recipe(ROOT / "recipes/qdora_distributed.py", [*words, "model.path=/nofolder"])
    lines = str(error.value).splitlines()
    heads[:2] = ["/nofolder/config.json: "]
    assert len(lines) == 4 and all(map(str.startswith, lines, heads)), lines


# Keys of example configs that the projects publish, and of the arguments of their trainers.
PUBLISHED = {
    "Axolotl": """adam_eps base_model_config eot_tokens eta_min fp8 liger_layer_norm liger_rope
        lora_target_parameters loss_watchdog_patience max_packed_sequence_len pretraining_dataset
        processor_type revision_of_model skip_prepare_dataset tokenizer_use_mistral_common
        adapter base_model bf16 chat_template dataset_prepared_path datasets debug
        deepspeed early_stopping_patience eval_sample_packing eval_table_size evals_per_epoch
        flash_attention fp16 fsdp fsdp_config gradient_checkpointing gradient_checkpointing_kwargs
        group_by_length hub_model_id kto_desirable_weight learning_rate liger_rms_norm load_in_4bit
        load_in_8bit local_rank logging_steps lora_alpha lora_dropout lora_fan_in_fan_out
        lora_mlp_kernel lora_model_dir lora_modules_to_save lora_r lora_target_linear
        lora_target_modules micro_batch_size model_type num_epochs pad_to_sequence_len plugins
        remove_unused_columns resume_from_checkpoint rl rl_beta sample_packing saves_per_epoch
        sequence_len special_tokens strict tf32 tokenizer_type train_on_inputs val_set_size
        wandb_entity wandb_log_model wandb_name wandb_project wandb_watch warmup_ratio warmup_steps
        weight_decay xformers_attention""",
    "LLaMA-Factory": """oft_block_size oft_target pissa_init pissa_iter pure_bf16 use_muon
        bf16 cutoff_len dataloader_num_workers ddp_timeout do_train
        enable_liger_kernel eval_steps eval_strategy finetuning_type fp16 learning_rate
        logging_steps lora_rank lora_target lr_scheduler_type max_samples model_name_or_path
        num_train_epochs overwrite_cache overwrite_output_dir per_device_eval_batch_size
        per_device_train_batch_size plot_loss pref_beta pref_loss preprocessing_num_workers
        quantization_bit report_to resume_from_checkpoint save_only_model save_steps stage template
        trust_remote_code val_size warmup_ratio""",
    "ms-swift": """adapters attn_impl lazy_tokenize load_from_cache_file merge_lora quant_bits
        rlhf_type router_aux_loss_coef sequence_parallel_size split_dataset_ratio system tuner_type
        train_type truncation_strategy val_dataset""",
    "NeMo Automodel": """cp_size dataloader dist_env ep_size loss_fn packed_sequence peft recipe rng
        step_scheduler tp_size""",
    "TRL": """dataset_mixture dataset_streaming dataset_test_split eos_token model_revision
        packing_strategy pad_to_multiple_of shuffle_dataset assistant_only_loss
        attn_implementation beta bf16 dataset_num_proc dataset_text_field
        desirable_weight eval_packing gradient_checkpointing_kwargs label_smoothing loss_type
        max_length max_prompt_length optim packing per_device_train_batch_size
        precompute_ref_log_probs push_to_hub ref_model reference_free rpo_alpha simpo_gamma
        undesirable_weight use_liger_kernel use_peft""",
    "PEFT": """bias init_lora_weights layers_to_transform lora_alpha lora_dropout modules_to_save r
        rank_pattern target_modules target_parameters task_type trainable_token_indices use_dora
        use_rslora""",
    "Unsloth": """bias full_finetuning load_in_4bit loftq_config lora_alpha max_seq_length
        model_name r random_state target_modules token use_gradient_checkpointing use_rslora""",
    "torchtune": """batch_size_val checkpointer cudnn_deterministic_mode device dtype
        enable_activation_checkpointing enable_activation_offloading fsdp_cpu_offload loss
        lora_attn_modules max_steps_per_epoch optimizer_in_bwd profiler.active_steps
        resume_from_checkpoint run_val_every_n_steps save_adapter_weights_only shuffle
        tensor_parallel_dim""",
}


@pytest.mark.parametrize("project", PUBLISHED)
def test_keys_of_published_configs_are_known(project: str) -> None:
    keys = PUBLISHED[project].split()
    unknown = [key for key in keys if not answer_to(key, True) and not has_key(DPO, key)]
    assert not unknown


def test_arguments_of_components() -> None:
    taken = "'torch.optim.AdamW' takes no argument"
    for kwargs, message in [
        (
            {"learning_rate": 1},
            f"optimizer.learning_rate: {taken} 'learning_rate'; here it is 'optimizer.lr'",
        ),
        (
            {"momentum": 1},
            f"optimizer.momentum: {taken} 'momentum'; remove it: ~optimizer.momentum",
        ),
        (
            {"momentum": 1, "lr": 1.0, "nesterov": True},
            "optimizer: 'torch.optim.AdamW' takes no arguments 'momentum', 'nesterov'; "
            "remove them: ~optimizer.momentum ~optimizer.nesterov",
        ),
    ]:
        with pytest.raises(UserError) as error:
            Component("torch.optim.AdamW", kwargs).check("optimizer", ["params"])
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("place", "path", "kwargs"),
    [
        ("tokenizer", "qfsdp.data.hf_tokenizer", {"path": "x", "max_seq_len": -3}),
        ("lr_scheduler", "qfsdp.training.cosine_with_warmup", {"num_warmup_steps": -5}),
        (
            "lr_scheduler",
            "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            {"num_warmup_steps": -5},
        ),
    ],
)
def test_bounds_of_arguments(place: str, path: str, kwargs: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"-\d is not valid; expected an integer of at least [01]$"):
        Component(path, kwargs).check(place, None)


def test_the_words_of_a_message_repair_the_config(tmp_path: Path) -> None:
    """What the error says to remove is all there is to remove."""
    words = ["--config", str(ROOT / CONFIGS[QDORA]), "dataset._component_=qfsdp.data.chat_dataset"]
    with pytest.raises(UserError) as error:
        load_config(QDORA, words).dataset.check("dataset", ["tokenizer"])  # type: ignore[attr-defined]
    removed = str(error.value).partition("remove them: ")[2].split()
    assert removed == ["~dataset.prompt_template", "~dataset.answer_column"]
    load_config(QDORA, words + removed).dataset.check("dataset", ["tokenizer"])  # type: ignore[attr-defined]
