"""Losses of FP8 and bf16 on a real model: QLoRA or QDoRA on SmolLM2, several seeds of each.

    python benchmarks/fp8_losses.py [--quick] [--json fp8.json] [--work DIR]
                                    [--updates 200] [--seeds 3] [--method lora]

SmolLM2-135M-Instruct learns generated arithmetic word problems (`examples.demo.arithmetic`) with
`quantization.compute` bf16 and fp8. A seed is one of the adapters and of the samples' order, the
same for both. Without a GPU that multiplies FP8, its numbers are multiplied in fp32
(`QFSDP_EMULATE_FP8`): the losses are the same, the time is not.

Finished runs are kept in `--work` (runs/fp8_losses): killed, the same command goes on.

    unseen/COMPUTE/SEED     loss of 150 problems that were not trained on, after the last update
    served/COMPUTE/SEED     the same, computed in bf16, as generation and serving do
    trained/COMPUTE/SEED    mean loss of the last quarter of the updates
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.compare_methods import DTYPE, evaluation, run_recipe, shipped
from benchmarks.timing import Figures, arguments, table, tell
from examples.demo import cache_dir
from examples.demo.arithmetic import generate
from examples.demo.smollm2 import prepare_model

COMPUTE = ("bf16", "fp8")
UNSEEN, SEED = 150, 30_000  # problems, and the seed that they are made with


def train(work: Path, model: Path, compute: str, method: str, seed: int, updates: int) -> Path:
    """Trains, unless an earlier call has; returns the run's folder."""
    out = work / f"{method}_{compute}_{seed}_{updates}"
    if not (out / "finished").exists():
        shutil.rmtree(out, ignore_errors=True)
        cfg = shipped("smollm2_135m_qlora")
        cfg.update(output_dir=str(out), seed=seed, max_steps=updates, batch_size=4)
        cfg.update(epochs=100, metric_logger=None, preflight=False)
        cfg.model.update(path=str(model), dtype=DTYPE, quantize_cache=str(work / "quantized"))
        cfg.adapter.method, cfg.quantization.compute = method, compute
        cfg.dataset.source = str(work / "train.jsonl")
        unseen = {**cfg.dataset, "source": str(work / "unseen.jsonl")}
        cfg.validation = {"sets": {"unseen": unseen}, "eval_every": updates, "keep_best": False}
        run_recipe("smollm2_135m_qlora", cfg, out)
        (out / "finished").touch()
    return out


def serve(work: Path, model: Path, run: Path) -> float:
    """The loss of the unseen problems with a run's adapter over the NF4 base, in bf16."""
    results = run / "served" / "results.json"
    if not results.exists():
        cfg = evaluation(results, model, "nf4", run / "adapter", model, work)
        cfg.update(text={}, exact_match={})
        dataset = shipped("smollm2_135m_qlora").dataset
        cfg.loss = {"unseen": {**dataset, "source": str(work / "unseen.jsonl")}}
        run_recipe("evaluate", cfg, results.parent)
    found = json.loads(results.read_text())["results"]
    return float(next(result["value"] for result in found if result["metric"] == "loss"))


def read_losses(run: Path) -> tuple[float, float]:
    """The loss of the unseen problems, and the mean of the last quarter of the updates."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    unseen = [v for line in lines if (v := line.get("validation/unseen/loss")) is not None]
    return unseen[-1], mean(losses[-max(1, len(losses) // 4) :])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/fp8_losses"))
    parser.add_argument("--updates", type=int, default=200, help="of 4 problems")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--method", choices=("lora", "dora"), default="lora")
    args = parser.parse_args()
    seeds, updates = (1, 2) if args.quick else (args.seeds, args.updates)
    if not torch.cuda.is_available():
        os.environ["QFSDP_EMULATE_FP8"] = "1"
    work: Path = args.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    problems = generate(2000 + UNSEEN, SEED)
    for name, rows in (("train", problems[:2000]), ("unseen", problems[2000:])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = prepare_model(cache_dir())
    figures: Figures = {}
    kinds = ("unseen", "served", "trained")
    lines = [["seed", *(f"{compute} {kind}" for kind in kinds for compute in COMPUTE)]]
    for seed in range(seeds):
        for compute in COMPUTE:
            run = train(work, model, compute, args.method, seed, updates)
            unseen, trained = read_losses(run)
            for kind, loss in zip(kinds, (unseen, serve(work, model, run), trained), strict=True):
                figures[f"{kind}/{compute}/{seed}"] = loss
        keys = (f"{kind}/{compute}/{seed}" for kind in kinds for compute in COMPUTE)
        lines.append([str(seed), *(f"{figures[key]:.4f}" for key in keys)])
    table(lines)
    tell({}, args.json, figures)


if __name__ == "__main__":
    main()
