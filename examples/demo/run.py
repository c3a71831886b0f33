"""`make demo`: QDoRA on a real model, from nothing to an adapter, on two CPU ranks.

Takes SmolLM2-135M-Instruct and generated arithmetic problems, measures the model on problems
that are held out, finetunes it with the command that a user would type, and measures again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qfsdp.cli.config import load_config
from qfsdp.cli.errors import user_errors
from qfsdp.cli.quiet import quiet_torchao
from qfsdp.cli.recipes import find_file, load_recipe
from qfsdp.distributed.world import init_world
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.heldout_loss import held_out_batches, held_out_loss
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.prompts import chat_tokens

from .prepare import prepare

RECIPE = "recipes/qdora_distributed"
CONFIG = "configs/smollm2_135m_qdora.yaml"
QUESTIONS = 3  # answered before and after
ANSWER_TOKENS = 48  # at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="runs/demo")
    parser.add_argument("--max-steps", type=int, default=32)
    parser.add_argument("--heldout", type=int, default=100, help="held-out problems to score")
    args = parser.parse_args()
    quiet_torchao()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same demonstration on every machine
    started = time.perf_counter()
    model, _, heldout = prepare()
    print(f"demo: model {model}\ndemo: held-out problems {heldout}", flush=True)
    overrides = [f"output_dir={args.output_dir}", f"max_steps={args.max_steps}"]
    # An earlier demonstration's: a run refuses to mix its checkpoints with others.
    shutil.rmtree(Path(args.output_dir) / "checkpoints", ignore_errors=True)

    before, answers_before = evaluate(overrides, heldout, args.heldout, adapter=None)
    command = ["run", "--nproc_per_node", "2", RECIPE, "--config", CONFIG, *overrides]
    print("demo: tune " + " ".join(command), flush=True)
    # Not the `tune` on PATH, which may belong to another environment.
    tune = Path(sys.executable).with_name("tune")
    status = subprocess.run([tune, *command]).returncode
    if status != 0:
        raise SystemExit(status)
    adapter = Path(args.output_dir) / "adapter"
    after, answers_after = evaluate(overrides, heldout, args.heldout, adapter)

    for (question, old), (_, new) in zip(answers_before, answers_after, strict=True):
        print(f"\nQ: {question}\nbefore: {old}\nafter:  {new}")
    print(f"\ndemo: {time.perf_counter() - started:.0f} s")
    print(f"demo: held-out loss {before:.3f} -> {after:.3f}")
    print(f"demo: curves: tensorboard --logdir {args.output_dir}; adapter (PEFT): {adapter}")


def evaluate(
    overrides: list[str], heldout: Path, count: int, adapter: Path | None
) -> tuple[float, list[tuple[str, str]]]:
    """Mean loss over the answer tokens of `count` held-out problems, and (question, answer)
    of the first few, by the quantized model with or without an adapter."""
    recipe = load_recipe(find_file(RECIPE) or RECIPE)
    argv = ["--config", find_file(CONFIG) or CONFIG, f"dataset.source={heldout}"]
    cfg: Any = load_config(recipe.Config, [*argv, *overrides, f"dataset.max_rows={count}"])
    world, tokenizer = init_world(), cfg.tokenizer.build()
    told = None if adapter is None else str(adapter)
    model = load_for_inference(cfg.model, cfg.quantization, told, cfg.sharding, world)
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


if __name__ == "__main__":
    with user_errors():
        main()
