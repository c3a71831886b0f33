"""Benchmarks before and after finetuning on conversations: ARC, HellaSwag, TruthfulQA.

    python benchmarks/before_after.py --conversations FILE.jsonl --tasks FOLDER
                                      [--quick] [--json guanaco.json] [--work DIR] [--limit 200]

SmolLM2-135M-Instruct is finetuned by QLoRA (configs/smollm2_135m_qlora.yaml) on conversations in
Guanaco's form, and lm-eval's tasks are run with and without the adapter, over the same NF4 base,
without examples. `--tasks` is a folder for `lm_eval.local_data`. Each score has its 95 % interval,
and a sign test on the same rows says whether it has changed (McNemar's exact test; Holm's
correction for the number of tasks).

Finished parts are kept in `--work` (runs/before_after): killed, the same command goes on.

    TASK/METRIC/base, TASK/METRIC/tuned    values; _low, _high: intervals
    TASK/METRIC/p                          of the sign test
    conversations_loss/base, /tuned        held-out loss of conversations that were not trained on
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.compare_methods import DTYPE, evaluation, run_recipe, shipped
from benchmarks.paired import holm, sign_test
from benchmarks.timing import arguments, table
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2")
HELD_OUT = 60  # conversations
Lines = list[dict[str, Any]]


def split(conversations: Path, work: Path) -> tuple[Path, Path]:
    """Writes the conversations to train on and those to hold out."""
    lines = conversations.read_text().splitlines()
    files = work / "train.jsonl", work / "heldout.jsonl"
    for file, part in zip(files, (lines[:-HELD_OUT], lines[-HELD_OUT:]), strict=True):
        file.write_text("\n".join(part) + "\n")
    return files


def train(work: Path, model: Path, file: Path, steps: int) -> Path:
    """Finetunes, unless an earlier call has; returns the adapter's folder."""
    out = work / "run"
    if not (out / "adapter" / "adapter_model.safetensors").exists():
        shutil.rmtree(out, ignore_errors=True)
        cfg = shipped("smollm2_135m_qlora")
        cfg.update(output_dir=str(out), max_steps=steps, batch_size=4, max_seq_len=512)
        cfg.update(metric_logger=None, preflight=False)
        cfg.dataset = {"_component_": "qfsdp.data.guanaco_dataset", "source": str(file)}
        cfg.model.update(path=str(model), dtype=DTYPE, quantize_cache=str(work / "quantized"))
        cfg.optimizer.lr = 2e-4
        run_recipe("smollm2_135m_qlora", cfg, out)
    return out / "adapter"


def evaluate(
    work: Path, name: str, model: Path, adapter: Path | None, held_out: Path, words: dict[str, Any]
) -> Path:
    """Runs the tasks, unless an earlier call has; returns the file of results."""
    results = work / name / "results.json"
    if not results.exists():  # is written last
        shutil.rmtree(work / name, ignore_errors=True)
        cfg = evaluation(results, model, "nf4", adapter, model, work)
        cfg.update(text={}, exact_match={})
        cfg.loss = {
            "conversations": {"_component_": "qfsdp.data.guanaco_dataset", "source": str(held_out)}
        }
        cfg.lm_eval = words
        cfg.max_seq_len = 512
        run_recipe("evaluate", cfg, work / name)
    return results


def rows(results: Path, task: str, metric: str) -> list[float]:
    """The metric of each row, in the order of the rows."""
    file = results.with_name(f"{results.stem}.lm_eval.{task}.jsonl")
    lines: Lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [float(line[metric]) for line in sorted(lines, key=lambda line: line["doc_id"])]


def compared(base: Path, tuned: Path) -> dict[str, Any]:
    """The figures of all metrics."""
    figures: dict[str, Any] = {}
    keys: list[str] = []
    ps: list[float] = []
    for name, file in (("base", base), ("tuned", tuned)):
        for found in json.loads(file.read_text())["results"]:
            if found["metric"] == "perplexity":
                continue
            key = f"{found['name']}/{found['metric']}"
            if found["section"] == "loss":
                key = f"{found['name']}_loss"
            figures[f"{key}/{name}"] = found["value"]
            if found["interval"] is not None:
                figures[f"{key}/{name}_low"], figures[f"{key}/{name}_high"] = found["interval"]
            if name == "base" and found["section"] == "lm_eval":
                keys.append(key)
    for key in keys:
        before, after = (rows(file, *key.split("/")) for file in (base, tuned))
        apart = [b - a for a, b in zip(before, after, strict=True)]
        figures[f"{key}/rows"] = len(apart)
        figures[f"{key}/better"] = sum(d > 0 for d in apart)
        figures[f"{key}/worse"] = sum(d < 0 for d in apart)
        ps.append(sign_test(figures[f"{key}/better"], figures[f"{key}/worse"]))
    figures |= {f"{key}/p": p for key, p in zip(keys, holm(ps), strict=True)}
    return figures


def cells(figures: dict[str, Any], key: str) -> list[str]:
    def score(name: str) -> str:
        low, high = (figures.get(f"{key}/{name}_{end}") for end in ("low", "high"))
        ends = "" if low is None else f" ({low:.3f} to {high:.3f})"
        return f"{figures[f'{key}/{name}']:.3f}{ends}"

    counts = [str(figures.get(f"{key}/{name}", "")) for name in ("better", "worse")]
    p = f"{figures[f'{key}/p']:.3f}" if f"{key}/p" in figures else ""
    return [key, score("base"), score("tuned"), *counts, p]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/before_after"))
    parser.add_argument("--steps", type=int, default=40, help="updates of 4 conversations")
    parser.add_argument("--limit", type=int, default=200, help="rows of each task")
    parser.add_argument("--tasks", type=Path, required=True, help="rows of the tasks")
    parser.add_argument("--conversations", type=Path, required=True, help="rows with `text`")
    args = parser.parse_args()
    work, steps, limit, tasks = args.work.absolute(), args.steps, args.limit, list(TASKS)
    if args.quick:
        work, steps, limit, tasks = work.with_name("before_after_quick"), 2, 4, tasks[:2]
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    model = prepare_model(cache_dir())
    train_file, held_out = split(args.conversations, work)
    words = {"tasks": tasks, "limit": limit, "num_fewshot": 0, "local_data": str(args.tasks)}
    base = evaluate(work, "base", model, None, held_out, words)
    adapter = train(work, model, train_file, steps)
    tuned = evaluate(work, "tuned", model, adapter, held_out, words)
    figures = compared(base, tuned)
    keys = [key.removesuffix("/base") for key in figures if key.endswith("/base")]
    head = ["", "before (95 %)", "after (95 %)", "rows better", "worse", "p"]
    table([head, *(cells(figures, key) for key in keys)])
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
