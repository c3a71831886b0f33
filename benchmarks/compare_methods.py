"""Finetuning methods on one task: what each learns, what it takes, and which differ.

    python benchmarks/compare_methods.py [--quick] [--json methods.json] [--work DIR]
                                         [--gsm8k FOLDER] [--rows NAME ...] [--tasks NAME ...]
                                         [--factors X ...] [--updates N] [--batch N]
                                         [--problems N] [--losses] [--chart methods.svg]

SmolLM2-135M-Instruct learns generated arithmetic word problems (`examples.demo.arithmetic`) by the
shipped recipes and configs, each run in a process, with several seeds: of the samples' order and
of new adapters. Of several learning rates of a method, the one with the lowest loss on a set kept
for that choice counts, at the first seed; one that ends in NaN is left out. Then every method
trains on GSM8K at that rate, if `--gsm8k` names a folder with its train.jsonl and test.jsonl.

    zero_shot, few_shot   the untrained model; few_shot with 4 solved problems before each
    full, full_nf4        all weights; the same with its linears quantized to NF4 after training
    qlora, qdora, hqq_dora
                          adapters over an NF4 or HQQ (hqq_dora) base
    llama_pro             3 new blocks over 30 frozen ones in NF4; evaluated as exported, plain
    lora, rslora, ia3, miss, oft, pissa
                          with `--rows` only; lora over a plain base, the others over NF4
    qdora_r64             with `--rows` only; rank 64 and alpha 128

How much of a difference is tuning, by four learning rates of each method:

    python benchmarks/compare_methods.py --rows full qlora qdora qdora_r64 --factors 0.1 0.3 1 3

Kinds of adapters by the held-out loss of short runs, without answers:

    python benchmarks/compare_methods.py --losses --rows qlora rslora qdora miss oft pissa

Figures are from unseen problems: exact match of greedy answers, and held-out loss, with 95 %
intervals over problems. All pairs of methods are compared on the same problems by sign tests,
corrected for their number; a pair is ordered if p < 0.05 and every seed says the same. Prints the
tables and writes them to `report.html` in `--work` (runs/methods), with curves and answers, after
every row.

Finished runs and evaluations are kept in `--work`: killed, the same command goes on, and the table
can be made by rows and tasks, several at a time.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from omegaconf import OmegaConf

from benchmarks.methods_page import Row, draw_curves, print_tables, write_study
from benchmarks.timing import arguments, table, usual_dtype
from examples.demo import cache_dir
from examples.demo.arithmetic import generate
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.lock import FolderLock

ROOT = Path(__file__).parent.parent
DTYPE = usual_dtype("cuda" if torch.cuda.is_available() else "cpu")
SEED = 20_000  # of the problems; the demonstration uses others
SHOTS = 4
Changes = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """How a row is trained: a shipped config, its changes, and the learning rates to choose from.

    As shipped there is one rate each: the best of 1e-4, 1e-3 and 1e-2 on other problems of the same
    kind (benchmarks/results, Methods on one task).
    """

    config: str
    rates: tuple[float, ...] = (1e-3,)
    changes: tuple[tuple[str, Any], ...] = ()
    adapter: bool = True  # trains an adapter, not weights themselves


METHODS = {
    "full": Method("smollm2_135m_full", (1e-4,), adapter=False),
    "qlora": Method("smollm2_135m_qlora"),
    "qdora": Method("smollm2_135m_qdora"),
    "hqq_dora": Method("smollm2_135m_hqq_dora"),
    "llama_pro": Method("smollm2_135m_llama_pro", (1e-2,), adapter=False),
    "lora": Method("smollm2_135m_qlora", changes=(("quantization.format", "none"),)),
    "rslora": Method("smollm2_135m_qlora", (3e-4, 1e-3), changes=(("adapter.rslora", True),)),
    "ia3": Method("smollm2_135m_ia3", (1e-2,)),
    "miss": Method("smollm2_135m_miss", (1e-3, 3e-3)),
    "oft": Method("smollm2_135m_qlora", (1e-3, 3e-3), changes=(("adapter.method", "oft"),)),
    "pissa": Method("smollm2_135m_qlora", (3e-4, 1e-3), changes=(("adapter.init", "pissa"),)),
    "qdora_r64": Method(
        "smollm2_135m_qdora", changes=(("adapter.rank", 64), ("adapter.alpha", 128.0))
    ),
}
ROWS = ("zero_shot", "few_shot", "full", "full_nf4", *list(METHODS)[1:])
USUAL = ROWS[:8]


@dataclass(frozen=True)
class Task:
    """What is learned, and how much of it.

    Fields:
        train, chosen_by, test: .jsonl files; `chosen_by` is for the choice of learning rates.
        seeds: runs of each method.
        steps: updates of `batch_size` problems.
        asked: problems of `test` that are answered; 0: training runs measure the loss of `test`.
        losses: problems of `test` whose loss is measured, in parts of ten.
        new_tokens: of an answer, at most.
    """

    name: str
    train: Path
    chosen_by: Path
    test: Path
    seeds: int = 3
    steps: int = 30
    batch_size: int = 8
    asked: int = 150
    losses: int = 150
    new_tokens: int = 64


QUICK: Changes = {"seeds": 2, "steps": 2, "batch_size": 1, "asked": 4, "losses": 20}
QUICK |= {"new_tokens": 8}
SHORT: Changes = {"steps": 60, "batch_size": 2, "asked": 0, "losses": 60}  # --losses


def tasks_in(work: Path, gsm8k: Path | None, sizes: Changes) -> list[Task]:
    """The tasks; writes the generated problems to `work`."""
    problems = generate(2040 + 300, SEED)
    train, chosen_by, test = (work / f"{name}.jsonl" for name in ("train", "chosen_by", "test"))
    cuts = (0, 2000, 2040, len(problems))
    for index, file in enumerate((train, chosen_by, test)):
        rows = problems[cuts[index] : cuts[index + 1]]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not file.exists() or file.read_text() != text:  # another call may read it
            file.write_text(text)
    found = [Task("arithmetic", train, chosen_by, test, **sizes)]
    if gsm8k is not None:
        train, test = gsm8k / "train.jsonl", gsm8k / "test.jsonl"  # rates are not chosen by it
        # Of a trained model's answers, 5 of 40 ended within 96 tokens, 37 to 60 of 100 within 256.
        found.append(Task("gsm8k", train, train, test, 3, 16, 4, 100, 150, 256))
    return found


class Study:
    """Trains and evaluates what is not in its folder yet."""

    def __init__(
        self, work: Path, gsm8k: Path | None, sizes: Changes, factors: Sequence[float] = (1.0,)
    ) -> None:
        """`sizes`: fields of the arithmetic task; `factors`: of a method's learning rates, which
        are tried too."""
        self.work, self.factors = work, factors
        work.mkdir(parents=True, exist_ok=True)
        self.model = prepare_model(cache_dir())
        self.tasks = tasks_in(work, gsm8k, sizes)
        kept, told = (
            work / "tasks.json",
            json.dumps([vars(task) for task in self.tasks], default=str),
        )
        if kept.exists() and kept.read_text() != told:
            raise SystemExit(
                f"--work: {work} holds a study of other sizes; expected another folder"
            )
        if not kept.exists():  # another call may read it
            kept.write_text(told)

    def row(self, task: Task, name: str) -> Row:
        """The figures of a method, measured now or in an earlier call; another call that is at the
        same method is waited for."""
        with self._lock(name):
            return self._row(task, name)

    def _lock(self, name: str) -> FolderLock:
        """A part that is not finished is removed and begun anew, so each has one writer."""
        of = "full" if name == "full_nf4" else name
        return FolderLock(self.work / "locks" / of, "--work", wait=True)

    def _row(self, task: Task, name: str) -> Row:
        seeds = 1 if name in ("zero_shot", "few_shot") else task.seeds
        if name in ("zero_shot", "few_shot"):
            found = [self._evaluate(task, name, seed, self.model, "none") for seed in range(seeds)]
            return self._read(task, name, {}, [], found)
        of = "full" if name == "full_nf4" else name
        method, rate = METHODS[of], self._rate(of)
        runs = [self._train(task, of, rate, seed) for seed in range(seeds)]
        found = []
        for seed, run in enumerate(runs):
            if method.adapter:
                base = shipped(method.config).quantization.format
                form = dict(method.changes).get("quantization.format", base)
                model, adapter = self.model, run / "adapter"
            else:
                form = "nf4" if name == "full_nf4" else "none"
                model, adapter = run / "model", None
            found.append(self._evaluate(task, name, seed, model, form, adapter))
        figures = [read_metrics(run / "metrics.jsonl") for run in runs]
        about = {"lr": rate, "search": self._search(of)} | {
            key: statistics.median(run[key] for run in figures) for key in figures[0]
        }
        return self._read(task, name, about, runs, found)

    def losses(self, name: str, seeds: int) -> Changes:
        """The held-out loss of some seeds of a method, and what its first run says of itself."""
        with self._lock(name):
            task, rate = self.tasks[0], self._rate(name)
            runs = [self._train(task, name, rate, seed) for seed in range(seeds)]
        found = [read_metrics(run / "metrics.jsonl") for run in runs]
        return {"lr": rate, **found[0], "of_seeds": [run["heldout_loss"] for run in found]}

    def _read(
        self, task: Task, name: str, about: Changes, runs: list[Path], found: list[Path]
    ) -> Row:
        right, losses = [], []
        for file in found:
            answers = sorted(read_rows(file, "exact_match.test"), key=lambda answer: answer["row"])
            right.append([float(answer["right"]) for answer in answers])
            if name != "few_shot":
                parts = read_rows(file, "loss.test")
                losses.append([(part["loss"], part["targets"]) for part in parts])
        return Row(task.name, name, right, losses, about, runs, found)

    def _rate(self, name: str) -> float:
        """The learning rate with the lowest loss on the set that chooses, at the first seed."""
        rates = self._rates(name)
        if len(rates) == 1:
            return rates[0]
        losses = self._search(name)
        if not losses:
            raise SystemExit(f"{name}: no finite loss at any rate of {rates}; expected others")
        return min(losses, key=lambda rate: losses[rate])

    def _rates(self, name: str) -> list[float]:
        return [float(f"{rate * by:.6g}") for rate in METHODS[name].rates for by in self.factors]

    def _search(self, name: str) -> dict[float, float]:
        """The loss that chooses, by rate; {} of one rate. A rate that ends in NaN is left out."""
        rates, losses = self._rates(name), dict[float, float]()
        for rate in rates if len(rates) > 1 else ():
            with suppress(NotFinite):
                run = self._train(self.tasks[0], name, rate, 0)
                loss = read_metrics(run / "metrics.jsonl")["chosen_by_loss"]
                losses |= {} if loss is None else {rate: loss}
        return losses

    def _train(self, task: Task, name: str, rate: float, seed: int) -> Path:
        """Trains, unless an earlier call has; returns the run's folder."""
        method, out = METHODS[name], self.work / f"{task.name}_{name}_{rate:g}_{seed}"
        if not (out / "finished").exists():
            shutil.rmtree(out, ignore_errors=True)
            cfg = shipped(method.config)
            for key, value in {**dict(method.changes), **self._run(task, out, rate, seed)}.items():
                OmegaConf.update(cfg, key, value, merge=False)
            if method.adapter:
                cfg.model.quantize_cache = str(self.work / "quantized")
            if name == "llama_pro":
                cfg.model.path = str(self._expanded())
            run_recipe(method.config, cfg, out)
            (out / "finished").touch()
            found = {"run": out.name} | read_metrics(out / "metrics.jsonl")
            with (self.work / "runs.jsonl").open("a") as lines:
                lines.write(json.dumps(found) + "\n")
        return out

    def _run(self, task: Task, out: Path, rate: float, seed: int) -> Changes:
        """The keys that all runs share."""
        rows = {
            "_component_": "qfsdp.data.instruct_dataset",
            "prompt_column": "question",
            "answer_column": "answer",
        }
        sets = {"chosen_by": rows | {"source": str(task.chosen_by), "max_rows": 40}}
        if not task.asked:
            sets["chosen_by"]["max_rows"] = 20
            sets["heldout"] = rows | {"source": str(task.test), "max_rows": task.losses}
        return {
            "output_dir": str(out),
            "seed": seed,
            "model.path": str(self.model),
            "model.dtype": DTYPE,
            "dataset": rows | {"source": str(task.train)},
            "validation": {"sets": sets, "keep_best": False},
            "validation.eval_every": task.steps,
            "optimizer.lr": rate,
            "max_steps": task.steps,
            "max_seq_len": 512,
            "batch_size": task.batch_size,
            "gradient_accumulation_steps": 1,
            "checkpoint.every_minutes": None,
            "preflight": False,
            "metric_logger": None,
        }

    def _expanded(self) -> Path:
        """The folder of the model with 3 new blocks."""
        folder = self.work / "expanded"
        if not (folder / "config.json").exists():
            cfg = shipped("block_expansion")
            cfg.update(model={"path": str(self.model)}, output_dir=str(folder))
            cfg.update(rate=None, new_blocks=3)
            run_recipe("block_expansion", cfg, self.work / "expansion")
        return folder

    def _evaluate(
        self,
        task: Task,
        name: str,
        seed: int,
        model: Path,
        quantized_as: str,
        adapter: Path | None = None,
    ) -> Path:
        """Evaluates, unless an earlier call has; returns the file of results."""
        out = self.work / f"{task.name}_{name}_{seed}.evaluation"
        results = out / "results.json"
        if results.exists():  # is written last
            return results
        shutil.rmtree(out, ignore_errors=True)
        cfg = evaluation(results, model, quantized_as, adapter, self.model, self.work)
        cfg.update(text={}, batch_size=10)
        rows = {"source": str(task.test)}
        columns = {"prompt_column": "question", "answer_column": "answer"}
        dataset = {"_component_": "qfsdp.data.instruct_dataset", "max_rows": task.losses}
        cfg.loss = {} if name == "few_shot" else {"test": rows | columns | dataset}
        # Large batches, as weights are dequantized once per new token; but caches take memory.
        at_once = 40 if name == "few_shot" else 250
        asked: Changes = {"max_rows": task.asked, "batch_size": min(at_once, task.asked)}
        shots = {"shots": SHOTS, "examples": str(task.train), "seed": seed}
        asked |= {"max_new_tokens": task.new_tokens} | (shots if name == "few_shot" else {})
        cfg.exact_match = {"test": rows | asked}
        run_recipe("evaluate", cfg, out)
        return results


def shipped(stem: str) -> Any:
    """A config of `configs/`."""
    return OmegaConf.load(ROOT / f"configs/{stem}.yaml")


def evaluation(
    results: Path, model: Path, format: str, adapter: Path | None, tokenizer: Path, work: Path
) -> Any:
    """The shipped config of an evaluation for a model in `format`; its sets stay to be named."""
    cfg = shipped("evaluate")
    cfg.update(output=str(results), adapter=adapter and str(adapter))
    cfg.model = {"path": str(model), "dtype": DTYPE, "quantize_cache": str(work / "quantized")}
    cfg.quantization = {"format": format}
    cfg.tokenizer = {"_component_": "qfsdp.data.hf_tokenizer", "path": str(tokenizer)}
    return cfg


class NotFinite(SystemExit):
    """A training run has ended because its loss was not finite: its learning rate is too high."""


def run_recipe(stem: str, cfg: Any, out: Path) -> None:
    """Runs the recipe of a shipped config with a changed config; its output goes to `out`.

    Raises:
        SystemExit: it has failed; `NotFinite` where the loss was not finite.
    """
    out.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, out / "changed.yaml")
    header = (ROOT / f"configs/{stem}.yaml").read_text().split("\n", 1)[0]
    recipe = ROOT / f"{header.split()[3]}.py"
    with (out / "log.txt").open("w") as log:
        command = [sys.executable, str(recipe), "--config", str(out / "changed.yaml")]
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        tail = "\n".join((out / "log.txt").read_text().splitlines()[-3:])
        kind = NotFinite if "first not finite" in tail else SystemExit
        raise kind(f"{recipe.name} failed, see {out / 'log.txt'}\n{tail}")


def read_metrics(file: Path) -> Changes:
    """From the metrics of a run: loss on the choosing set, peak memory, speed, parameters."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    speeds = [line["tokens_per_second_per_rank"] for line in lines if "loss" in line][1:]
    ends = {f"{key.split('/')[1]}_loss": line[key] for line in lines for key in line
            if key.startswith("validation/") and key.endswith("/loss")}  # fmt: skip
    return {
        **ends,
        "peak_memory_gib": max(line.get("peak_memory_gib", 0.0) for line in lines),
        "tokens_per_second": statistics.median(speeds),
        "trained": lines[0]["memory/parameters_trained_gib"] * 2**30 / 4,  # fp32
    }


def read_rows(results: Path, name: str) -> list[Changes]:
    """The lines of recipes/evaluate for one set."""
    file = results.with_name(f"{results.stem}.{name}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def print_losses(found: dict[str, Changes], json_file: Path | None) -> None:
    """Prints and writes the held-out loss of each method: its mean over seeds, and each."""
    lines = [["", "loss", "of seeds", "lr", "trained"]]
    for name, of in found.items():
        seeds = of["of_seeds"]
        line = [name, f"{statistics.fmean(seeds):.4f}", " ".join(f"{x:.4f}" for x in seeds)]
        lines.append([*line, f"{of['lr']:g}", f"{of['trained']:,.0f}"])
    table(lines)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=None, help="folder that keeps finished parts")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help=f"default: {', '.join(USUAL)}")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--tasks", nargs="+", choices=("arithmetic", "gsm8k"), help="default: all")
    parser.add_argument(
        "--factors", nargs="+", type=float, default=[1.0], help="of learning rates; default: 1"
    )
    parser.add_argument("--chart", type=Path, help="an SVG of the losses of the first task")
    parser.add_argument("--updates", type=int, help="of each run on arithmetic; default: 30")
    parser.add_argument("--batch", type=int, help="problems of an update; default: 8")
    parser.add_argument("--problems", type=int, help="unseen ones that are answered; default: 150")
    parser.add_argument("--losses", action="store_true", help="of 60 updates of 2; no answers")
    args = parser.parse_args()
    names, work = args.rows or USUAL, args.work or Path("runs/methods")
    if args.quick:
        names = args.rows or ("zero_shot", "qlora")
        work, args.gsm8k = args.work or Path("runs/methods_quick"), None
        shutil.rmtree(work, ignore_errors=True)
    if args.gsm8k is None:
        print("gsm8k: skipped; --gsm8k names the folder of its train.jsonl and test.jsonl")
    elif not (args.gsm8k / "test.jsonl").is_file():
        parser.error(f"--gsm8k: {args.gsm8k} has no test.jsonl; expected it beside train.jsonl")
    gsm8k = args.gsm8k and args.gsm8k.absolute()
    given = {"steps": args.updates, "batch_size": args.batch, "asked": args.problems}
    given |= {"losses": args.problems}
    sizes = (SHORT if args.losses else {}) | (QUICK if args.quick else {})
    sizes |= {key: size for key, size in given.items() if size}
    sizes |= {"asked": 0} if args.losses else {}
    study = Study(work.absolute(), gsm8k, sizes, args.factors)
    if args.losses:
        for seed in range(study.tasks[0].seeds):  # killed, it has whole seeds of all methods
            for name in names:
                study.losses(name, seed + 1)
        print_losses({name: study.losses(name, seed + 1) for name in names}, args.json)
        return
    rows: list[Row] = []
    for task in study.tasks:
        if args.tasks and task.name not in args.tasks:
            continue
        for name in names:
            rows.append(study.row(task, name))
            print(f"{task.name}: {name}", flush=True)
            write_study(work / "report.html", rows)
    figures = print_tables(rows)
    if args.chart is not None:
        draw_curves(args.chart, [row for row in rows if row.task == rows[0].task])
    print(work / "report.html")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
