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

import torch

from qfsdp.checkpoint.export import load_adapter
from qfsdp.config import load_config
from qfsdp.data import HFTokenizer, StepLoader
from qfsdp.demo.prepare import prepare
from qfsdp.distributed import init_world
from qfsdp.launch import load_recipe, user_errors
from qfsdp.modules.adapters import refresh_dora_norms
from qfsdp.modules.transformer import Decoder
from qfsdp.tune_hook import find_file, quiet_torchao

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


@torch.no_grad()
def evaluate(
    overrides: list[str], heldout: Path, count: int, adapter: Path | None
) -> tuple[float, list[tuple[str, str]]]:
    """Mean loss over the answer tokens of `count` held-out problems, and (question, answer)
    of the first few, by the quantized model with or without an adapter."""
    recipe = load_recipe(find_file(RECIPE, ".py"))
    argv = ["--config", find_file(CONFIG, ".yaml"), f"dataset.source={heldout}"]
    cfg: Any = load_config(recipe.Config, [*argv, *overrides, f"dataset.max_rows={count}"])
    world = init_world()
    model = recipe.load_model(cfg, world).eval()
    if adapter is not None:
        load_adapter(model, adapter)
        refresh_dora_norms(model)
    loader: StepLoader = recipe.build_loader(cfg, world)
    total, targets = 0.0, 0
    for step in range(loader.steps_per_epoch):
        for batch in loader.step(step):
            batch = batch.to(world.device)
            total += model(
                batch.tokens, batch.positions, labels=batch.labels, cu_seqlens=batch.cu_seqlens
            ).item()
            targets += batch.num_targets
    return total / targets, answer(model, cfg.tokenizer.build(), heldout, world.device)


def answer(
    model: Decoder, tokenizer: HFTokenizer, heldout: Path, device: torch.device
) -> list[tuple[str, str]]:
    """Greedy answers to the first held-out questions, all in one batch.

    Without a key/value cache: prompts are padded on the right, where causal attention does not
    look, and every row grows at its own end.
    """
    lines = heldout.read_text(encoding="utf-8").splitlines()[:QUESTIONS]
    questions = [json.loads(line)["question"] for line in lines]
    prompts = [
        tokenizer.encode(
            tokenizer.render([{"role": "user", "content": q}], add_generation_prompt=True),
            add_bos=False,
            add_eos=False,
        )
        for q in questions
    ]
    ends = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.full((len(prompts), int(ends.max()) + ANSWER_TOKENS), tokenizer.pad_id)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens, rows = tokens.to(device), torch.arange(len(prompts), device=device)
    open_rows = torch.ones_like(rows, dtype=torch.bool)
    for _ in range(ANSWER_TOKENS):
        best = model(tokens[:, : int(ends.max())])[rows, ends - 1].argmax(-1)
        open_rows &= best != tokenizer.eos_id
        if not open_rows.any():
            break
        tokens[rows, ends] = torch.where(open_rows, best, tokenizer.pad_id)
        ends += open_rows
    texts = [
        tokenizer.decode(tokens[row, len(prompt) : int(end)].tolist()).strip()
        for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True))
    ]
    return [(q, text.replace("\n", " ")) for q, text in zip(questions, texts, strict=True)]


if __name__ == "__main__":
    with user_errors():
        main()
