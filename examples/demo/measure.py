"""Measures a model on held-out problems: the loss, and some answers to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import find_file, load_recipe
from qfsdp.distributed.world import init_world
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.heldout_loss import held_out_batches, held_out_loss
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.prompts import chat_tokens

QUESTIONS = 3
ANSWER_TOKENS = 48


def measure(
    recipe_name: str,
    config_name: str,
    overrides: list[str],
    heldout: Path,
    count: int,
    adapter: Path | None,
) -> tuple[float, list[tuple[str, str]]]:
    """Measures the quantized model of a config, with or without an adapter.

    Args:
        overrides: `key=value` words for the config.
        heldout: a .jsonl file of problems.
        count: number of problems for the loss.

    Returns:
        The mean loss over the answer tokens of `count` problems (nats), and the first three
        problems as (question, answer).
    """
    recipe = load_recipe(find_file(recipe_name) or recipe_name)
    argv = ["--config", find_file(config_name) or config_name, f"dataset.source={heldout}"]
    cfg: Any = load_config(recipe.Config, [*argv, *overrides, f"dataset.max_rows={count}"])
    world, tokenizer = init_world(), cfg.tokenizer.build()
    adapter_path = None if adapter is None else str(adapter)
    model = load_for_inference(cfg.model, cfg.quantization, adapter_path, cfg.sharding, world)
    dataset = cfg.dataset.build(tokenizer=tokenizer)
    batches = held_out_batches(dataset, cfg.batch_size, world, tokenizer.pad_id, cfg.max_seq_len)
    loss, targets = held_out_loss(model, batches, world)

    lines = heldout.read_text(encoding="utf-8").splitlines()[:QUESTIONS]
    questions = [json.loads(line)["question"] for line in lines]
    prompts = [chat_tokens(tokenizer, [{"role": "user", "content": q}]) for q in questions]
    sampling, stops = SamplingConfig(max_new_tokens=ANSWER_TOKENS), {tokenizer.eos_id}
    answers = generate(model, prompts, sampling, stops, world)
    texts = [tokenizer.decode(answer).strip().replace("\n", " ") for answer in answers]
    return loss / targets, list(zip(questions, texts, strict=True))
