"""`python -m qfsdp.examples.demo.preferences`: DPO on 200 generated pairs, before and after.

Makes the model, the pairs (right and wrong solutions of arithmetic problems) and the problems, runs
recipes/dpo_distributed with configs/smollm2_135m_dpo.yaml on one CPU process, and prints of the
base model and of the adapter, with 95 % intervals:

    reward accuracy   held-out pairs whose right solution has the larger reward, that is, gained
                      more probability; before training every reward is 0
    likelier          held-out pairs whose right solution is more likely than the wrong one
    exact match       held-out problems that are answered correctly, greedily

Other `key=value` words go to the recipe.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from qfsdp.common.errors import user_errors
from qfsdp.common.quiet import quiet_torchao

from . import cache_dir
from .pairs import write_pairs
from .prepare import prepare
from .progress import run_command, say, working

RECIPE, CONFIG = "recipes/dpo_distributed", "configs/smollm2_135m_dpo.yaml"
ANSWER_TOKENS = 96


def measure(words: list[str], pairs: Path, problems: Path, count: int, adapter: Path | None) -> Any:
    """The log-probabilities of the answers of all held-out pairs, fp32 `[pairs, 2]`, right before
    wrong, and the exact match on `count` problems."""
    import torch  # takes seconds

    from qfsdp.config.load import load_config
    from qfsdp.config.recipe_files import find_file, load_recipe
    from qfsdp.distributed.world import init_world
    from qfsdp.evaluation.exact_match import ExactMatchConfig, exact_match, read_questions
    from qfsdp.evaluation.inference_model import load_for_inference
    from qfsdp.training.preference import sequence_logprobs

    recipe = load_recipe(find_file(RECIPE) or RECIPE)
    given = ["--config", find_file(CONFIG) or CONFIG, *words, f"dataset.source={pairs}"]
    cfg: Any = load_config(recipe.Config, given)
    world, tokenizer = init_world(), cfg.tokenizer.build()
    chosen = None if adapter is None else str(adapter)
    model = load_for_inference(cfg.model, cfg.quantization, chosen, cfg.sharding, world)
    loader = recipe.build_loader(cfg, world)
    found = torch.full((len(loader.items), 2), torch.nan)
    with torch.no_grad():
        for batch in loader.epoch():
            found[loader.items_of(batch)] = sequence_logprobs(model, batch).view(-1, 2)
    asked = ExactMatchConfig(str(problems), max_rows=count, max_new_tokens=ANSWER_TOKENS)
    questions = read_questions("problems", asked, tokenizer)
    return found, exact_match(model, questions, asked, tokenizer, {tokenizer.eos_id}, world, 10)


def share(hits: int, total: int) -> str:
    from qfsdp.evaluation.intervals import wilson

    low, high = wilson(hits, total)
    return f"{100 * hits / total:.1f} % ({100 * low:.1f} to {100 * high:.1f}) of {total}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output-dir", default="runs/preferences", help="folder of the run")
    parser.add_argument("--problems", type=int, default=50, help="problems for the exact match")
    args, words = parser.parse_known_args()
    quiet_torchao()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine
    began = time.perf_counter()
    with working(f"preparing the model, pairs and problems in {cache_dir()}"):
        _, _, problems = prepare()
        _, pairs = write_pairs(cache_dir() / "arithmetic")
    words = [f"output_dir={args.output_dir}", *words]
    with working("measuring the base model"):
        before, right = measure(words, pairs, problems, args.problems, None)
    shutil.rmtree(Path(args.output_dir) / "checkpoints", ignore_errors=True)
    tune = Path(sys.executable).with_name("tune")
    trained = time.perf_counter()
    status = run_command("training", [str(tune), "run", RECIPE, "--config", CONFIG, *words])
    trained = time.perf_counter() - trained
    if status:
        raise SystemExit(status)
    with working("measuring the adapter"):
        adapter = Path(args.output_dir) / "adapter"
        after, now_right = measure(words, pairs, problems, args.problems, adapter)
    count, gained = len(after), after - before
    likelier = [int((p[:, 0] > p[:, 1]).sum()) for p in (before, after)]
    say(f"reward accuracy: 0 before; {share(int((gained[:, 0] > gained[:, 1]).sum()), count)}")
    say(f"right solution likelier: {share(likelier[0], count)}; {share(likelier[1], count)}")
    say(f"exact match: {share(right.right, right.rows)}; {share(now_right.right, right.rows)}")
    minutes = (time.perf_counter() - began) / 60
    say(f"training took {trained / 60:.1f} minutes, all of it {minutes:.1f}")


if __name__ == "__main__":
    with user_errors():
        main()
