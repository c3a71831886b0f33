"""What a resumed run may change: the class of every key of the training recipes.

A new field of a recipe's `Config`, or of a section in it, enters one of the lists below; a test
fails until it does. A component (`optimizer`, `dataset`, ...) has one class for its arguments.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from qfsdp.data.files.file_records import SUFFIXES
from qfsdp.data.reading import NOT_IN_RESULTS

Class = Literal["same", "told", "free"]
"""Of a key: a resumed run must have the same value ("same"); it may have another, and says so
("told"); the value changes no number that is trained ("free")."""

_SAME = """
    seed max_seq_len packed optimizer_in_backward model.dtype model.implementation
    model.router_aux_loss tokenizer dataset optimizer lr_scheduler loss reference
    quantization.format quantization.targets quantization.compute model.mean_rows
    adapter.method adapter.rank adapter.alpha adapter.dropout adapter.targets adapter.rslora
    adapter.init adapter.lora_plus_ratio adapter.start_from adapter.expert_rank
    adapter.expert_sharing adapter.layers adapter.exclude adapter.rank_pattern adapter.alpha_pattern
    adapter.block_size adapter.modules_to_save adapter.trainable_token_indices head.classes
    head.center
    teacher.model.dtype teacher.model.implementation teacher.model.router_aux_loss
    teacher.model.mean_rows
    teacher.quantization.format teacher.quantization.targets teacher.quantization.compute
    teacher.adapter distillation.divergence distillation.beta distillation.temperature
    distillation.weight distillation.top_k
    trainable.layers trainable.embeddings trainable.dtype adapters
"""

# The length of the run, limits that keep it healthy, and what changes only rounding.
_TOLD = """
    epochs max_steps clip_grad_norm on_nonfinite compile cuda_graphs activation.tile_tokens
    sharding.strategy sharding.cpu_offload sharding.vocabulary sharding.reduce_gradients
    sharding.expert_parallel sharding.context_parallel
    validation.metric validation.patience
"""

# Files, memory and logs. The base is compared by its weights, the sizes of batches by their
# product. Weights that are kept quantized or on disk are the same bytes.
_FREE = """
    teacher.model.path teacher.model.quantize_cache teacher.model.max_positions
    teacher.quantization.expert_chunk teacher.logprobs
    output_dir model.path model.quantize_cache model.max_positions resume push_to_hub save_dtype
    batch_size gradient_accumulation_steps global_batch_size reference_logprobs
    metric_logger log_every_n_steps report preflight device_memory compile_cache_dir
    quantization.expert_chunk
    activation.checkpointing activation.every_n_layers activation.offload
    sharding.replicate sharding.shard sharding.wrap sharding.prefetch sharding.offload_base
    sharding.ring_memory
    distributed.timeout distributed.first_timeout
    checkpoint.every_n_steps checkpoint.every_minutes checkpoint.keep_last checkpoint.on_failure
    checkpoint.asynchronous checkpoint.publish checkpoint.publish_last
    validation.sets validation.eval_every validation.batch_size validation.max_batches
    validation.at_start validation.keep_best
    validation.lm_eval.tasks validation.lm_eval.num_fewshot validation.lm_eval.limit
    validation.lm_eval.chat_template validation.lm_eval.local_data
    profiler.steps profiler.ranks profiler.memory profiler.stacks
"""

CLASSES: dict[str, Class] = {
    **dict.fromkeys(_SAME.split(), "same"),
    **dict.fromkeys(_TOLD.split(), "told"),
    **dict.fromkeys(_FREE.split(), "free"),
}

ABSENT: dict[str, Any] = {
    "quantization.compute": "bf16",
    "adapter.block_size": 32,
    "packed": False,
    "optimizer_in_backward": False,
    "epochs": 1,
    "max_steps": None,
    "clip_grad_norm": 1.0,
    "on_nonfinite": "stop",
    "compile": False,
    "cuda_graphs": False,
    "activation.tile_tokens": None,
    "sharding.strategy": "full_shard",
    "sharding.cpu_offload": False,
    "sharding.vocabulary": "auto",
    "sharding.reduce_gradients": "auto",
    "sharding.expert_parallel": 1,
    "sharding.context_parallel": 1,
    "model.implementation": "auto",
    "validation.metric": None,
    "validation.patience": None,
}
"""Key -> its default, or what was done, when checkpoints did not have it. Null for other keys. It
stays as it is when a default changes."""

NOT_RECORDED = ("packed", "optimizer_in_backward", "model.router_aux_loss")
"""Keys of class "same" that earlier checkpoints do not have, though their runs had a value."""

_PATHS = ("path", "file", "folder", "dir", "source")
_NO_FILES = ("auto", "chatml", "plain")  # of tokenizer.chat_template


def _of_one(key: str) -> str:
    """The key of a run with one adapter for one of an adapter among several."""
    found = re.fullmatch(r"adapters\.[^.]+\.(.+)", key)
    if found is None:
        return key
    name = found[1].partition(".")[0]
    if name in ("dataset", "lr_scheduler", "seed"):
        return found[1]
    return "optimizer.lr" if name == "lr" else f"adapter.{found[1]}"


def class_of(key: str) -> Class:
    """The class of a dotted key. Keys that a copied recipe has added are "told"; what is no key but
    a digest or a product of keys, such as "model (its weights)", is "same"."""
    if " " in key:
        return "same"
    key = _of_one(key)
    if key.startswith("dataset.") and key.rpartition(".")[2] in NOT_IN_RESULTS:
        return "free"
    while key not in CLASSES and "." in key:
        key = key.rpartition(".")[0]
    return CLASSES.get(key, "told")


def names_a_file(key: str, settings: dict[str, Any]) -> bool:
    """Whether a key's value, a text, is the path of a file or folder. Any other text is compared as
    it is, whatever lies in the working directory.

    Of components these are the arguments with a path's name, such as `source` or `merges_file`.

    Args:
        settings: all keys, with their values.
    """
    value, (parent, _, name) = settings[key], key.rpartition(".")
    key = _of_one(key)
    if not isinstance(value, str) or not value:
        return False
    if key in ("adapter.start_from", "teacher.adapter"):
        return True
    if key.partition(".")[0] not in ("tokenizer", "dataset"):
        return False
    if name == "chat_template":
        return value not in _NO_FILES
    # torchtune's form: source: json, data_files: rows.jsonl
    kind = settings.get(f"{parent}.source") in SUFFIXES.values()
    if kind and settings.get(f"{parent}.data_files"):
        return name == "data_files"
    return name.rpartition("_")[2] in _PATHS
