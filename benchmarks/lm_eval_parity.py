"""lm-eval's tasks on our decoder and on lm-eval's `hf` model, with the same weights in fp32.

    python benchmarks/lm_eval_parity.py --data FOLDER [--quick] [--json lm_eval.json]
                                        [--limit 200]

ARC-Easy, ARC-Challenge, HellaSwag and TruthfulQA (MC1, MC2), with rows from files, on
SmolLM2-135M-Instruct. Both answer the same requests. Every score and every most likely choice is
compared.

    <task>_ours, <task>_hf    accuracy (MC2: the probability of the correct answers)
    <task>_differ             rows with different most likely choices
    largest_difference        largest difference of a log-likelihood, in nats
    equal                     1 if all accuracies and all most likely choices are equal, else 0
    ours_s, hf_s, speedup     seconds of all requests, without loading
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.timing import Figures, arguments, table, tell
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.data import hf_tokenizer
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.lm_harness import LMEvalConfig, TaskMetric, evaluate, load_tasks
from qfsdp.evaluation.prompts import stop_ids
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder

# Tasks with equal requests are in one group; ours computes these requests once.
GROUPS = [["arc_easy"], ["arc_challenge"], ["hellaswag"], ["truthfulqa_mc1", "truthfulqa_mc2"]]
Rows = dict[str, list[dict[str, Any]]]


def run(lm: Any, config: LMEvalConfig) -> tuple[list[TaskMetric], Rows, float]:
    """Scores, rows and seconds."""
    tasks = load_tasks(config)
    since = time.perf_counter()
    scores, rows = evaluate(config, tasks, lm)
    return scores, rows, time.perf_counter() - since


def likelihoods(row: dict[str, Any]) -> list[float]:
    return [float(value) for value, _ in row["filtered_resps"]]


def compare(ours: Rows, theirs: Rows) -> tuple[dict[str, int], float]:
    """Rows of each task with different most likely choices; the largest difference of a value."""
    differ, largest = {}, 0.0
    for task, rows in ours.items():
        pairs = [(likelihoods(a), likelihoods(b)) for a, b in zip(rows, theirs[task], strict=True)]
        differ[task] = sum(a.index(max(a)) != b.index(max(b)) for a, b in pairs)
        every = (abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))
        largest = max(largest, *every)
    return differ, largest


def models(device: str, batch_size: int) -> tuple[Any, Any]:
    """Our model and lm-eval's."""
    from lm_eval.models.huggingface import HFLM

    from qfsdp.evaluation.lm_harness_model import HarnessModel

    folder = prepare_model(cache_dir())
    world = World(torch.device(device))
    model = load_for_inference(
        ModelConfig(str(folder), "fp32"), QuantizationConfig("none"), None, ShardingConfig(), world
    )
    tokenizer = hf_tokenizer(str(folder))
    ours = HarnessModel(
        cast(Decoder, model), tokenizer, stop_ids(tokenizer, folder), world, batch_size
    )
    options = {"dtype": "float32", "device": device, "batch_size": batch_size}
    return ours, HFLM(pretrained=str(folder), **options)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", required=True, help="folder of the rows")
    parser.add_argument("--limit", type=int, default=200, help="rows of each task")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    limit = 2 if args.quick else args.limit
    lms = models(args.device, args.batch_size)
    figures: Figures = {"rows": limit, "equal": 1, "largest_difference": 0.0}
    seconds = [0.0, 0.0]
    lines = [("task", "metric", "ours", "hf", "rows that differ")]
    for tasks in GROUPS:
        config = LMEvalConfig(tasks, limit, local_data=args.data)
        (ours, our_rows, our_s), (theirs, their_rows, their_s) = (run(lm, config) for lm in lms)
        seconds = [seconds[0] + our_s, seconds[1] + their_s]
        differ, largest = compare(our_rows, their_rows)
        figures["largest_difference"] = max(figures["largest_difference"], largest)
        for a, b in zip(ours, theirs, strict=True):
            key = a.task if a.metric == "acc" else f"{a.task}_{a.metric}"
            figures |= {f"{key}_ours": a.value, f"{key}_hf": b.value}
            figures[f"{a.task}_differ"] = differ[a.task]
            # MC2 is a probability, so equal only within rounding.
            if differ[a.task] or abs(a.value - b.value) > 1e-4:
                figures["equal"] = 0
            told = (f"{a.value:.4f}", f"{b.value:.4f}", str(differ[a.task]))
            lines.append((a.task, a.metric, *told))
        figures |= {"ours_s": seconds[0], "hf_s": seconds[1], "speedup": seconds[1] / seconds[0]}
        print(f"{', '.join(tasks)}: ours {our_s:.1f} s, hf {their_s:.1f} s", flush=True)
        tell({}, args.json, figures)  # after every group
    table(lines)
    tell(figures, args.json)


if __name__ == "__main__":
    main()
