"""Finetuning methods on one task: what each learns, and what it takes.

    python benchmarks/compare_methods.py [--quick] [--json methods.json] [--work DIR]
                                         [--rows NAME ...]

SmolLM2-135M-Instruct learns generated arithmetic word problems (`examples.demo.arithmetic`) by the
shipped recipes and configs, each run in a process. Every method sees the same samples in the same
order, at each of the same learning rates. The rate with the lowest loss on a set kept for that
choice counts. Figures are from unseen problems: exact match of greedy answers with a 95 % interval,
and held-out loss. Then the method trains from the start on GSM8K at the chosen rate, which gives
its held-out loss there (`--gsm8k FOLDER` with train.jsonl and test.jsonl).

    zero_shot, few_shot   the untrained model; few_shot with 4 solved problems before each
    full, full_nf4        all weights; the same with its linears quantized to NF4 after training
    lora, qlora, rslora, qdora, hqq_dora, ia3
                          adapters over a plain (lora), NF4 or HQQ (hqq_dora) base
    llama_pro             3 new blocks over 30 frozen ones in NF4; evaluated as exported, plain

Takes two hours on two cores without AVX-512, in fp32. Finished parts are kept in `--work`
(runs/methods), and the same command goes on from there, so the table can be made row by row.
The keys of the JSON file are ROW_FIGURE.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from omegaconf import OmegaConf

from benchmarks.timing import arguments, table, tell, usual_dtype
from examples.demo import cache_dir
from examples.demo.arithmetic import generate
from examples.demo.smollm2 import prepare_model

ROOT = Path(__file__).parent.parent
DTYPE = usual_dtype("cuda" if torch.cuda.is_available() else "cpu")
GSM8K = ROOT.parent / "shared/data/gsm8k"
LEARNING_RATES = (1e-4, 1e-3, 1e-2)
SEED = 20_000  # of the problems; the demonstration uses others
Changes = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """How a row is trained: a shipped config and its changes."""

    config: str
    changes: tuple[tuple[str, Any], ...] = ()
    adapter: bool = True  # trains an adapter, not weights themselves


METHODS = {
    "full": Method("smollm2_135m_full", adapter=False),
    "lora": Method("smollm2_135m_qlora", (("quantization.format", "none"),)),
    "qlora": Method("smollm2_135m_qlora"),
    "rslora": Method("smollm2_135m_qlora", (("adapter.rslora", True),)),
    "qdora": Method("smollm2_135m_qdora"),
    "hqq_dora": Method("smollm2_135m_hqq_dora"),
    "ia3": Method("smollm2_135m_ia3"),
    "llama_pro": Method("smollm2_135m_llama_pro", adapter=False),
}
ROWS = ("zero_shot", "few_shot", "full", "full_nf4", *list(METHODS)[1:])


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparison."""

    rates: tuple[float, ...] = LEARNING_RATES
    steps: int = 30
    gsm8k_steps: int = 12
    batch_size: int = 4
    chosen_by: int = 40  # problems that choose the learning rate
    asked: int = 100  # problems of the test set
    new_tokens: int = 96  # of an answer, at most


QUICK = Sizes((1e-3,), steps=2, gsm8k_steps=0, batch_size=1, chosen_by=1, asked=2, new_tokens=8)


class Table:
    """The rows of the table, and the folder that keeps their runs."""

    def __init__(self, work: Path, sizes: Sizes, gsm8k: Path | None) -> None:
        self.work, self.sizes, self.gsm8k = work, sizes, gsm8k
        work.mkdir(parents=True, exist_ok=True)
        kept, told = work / "sizes.json", json.dumps(vars(sizes))
        if kept.exists() and kept.read_text() != told:
            raise SystemExit(
                f"--work: {work} holds a table of other sizes; expected another folder"
            )
        kept.write_text(told)
        self.model = prepare_model(cache_dir())
        problems = generate(2000 + sizes.chosen_by + sizes.asked, SEED)
        cuts = (0, 2000, 2000 + sizes.chosen_by, len(problems))
        self.files = {}
        for index, name in enumerate(("train", "chosen_by", "test")):
            self.files[name] = work / f"{name}.jsonl"
            rows = problems[cuts[index] : cuts[index + 1]]
            self.files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))

    def row(self, name: str) -> Changes:
        """The figures of a row, measured now or in an earlier call."""
        kept = self.work / f"{name}.json"
        if not kept.exists():
            figures = self._measure(name)
            kept.write_text(json.dumps(figures, indent=2) + "\n")
        found: Changes = json.loads(kept.read_text())
        return found

    def _measure(self, name: str) -> Changes:
        if name in ("zero_shot", "few_shot"):
            return self._evaluate(name, self.model, "none", shots=4 if name == "few_shot" else 0)
        of = "full" if name == "full_nf4" else name
        method = METHODS[of]
        losses = {rate: self._train(of, rate) for rate in self.sizes.rates}
        best = min(losses, key=lambda rate: losses[rate]["chosen_by_loss"])
        run = self._folder(of, best)
        base = self._config(method.config)
        if method.adapter:
            quantized_as = dict(method.changes).get("quantization.format", base.quantization.format)
            found = self._evaluate(name, self.model, quantized_as, adapter=run / "adapter")
        else:
            found = self._evaluate(name, run / "model", "nf4" if name == "full_nf4" else "none")
        figures = {"lr": best, **losses[best], **found}
        if self.gsm8k is not None and self.sizes.gsm8k_steps and name != "full_nf4":
            figures["gsm8k_loss"] = self._train(of, best, on_gsm8k=True)["chosen_by_loss"]
        return figures

    def _folder(self, name: str, rate: float, on_gsm8k: bool = False) -> Path:
        return self.work / f"{name}_{rate:g}{'_gsm8k' if on_gsm8k else ''}"

    def _config(self, stem: str) -> Any:
        return OmegaConf.load(ROOT / f"configs/{stem}.yaml")

    def _train(self, name: str, rate: float, on_gsm8k: bool = False) -> Changes:
        """Trains, unless an earlier call has; returns the logged figures."""
        method, out = METHODS[name], self._folder(name, rate, on_gsm8k)
        if not (out / "finished").exists():
            shutil.rmtree(out, ignore_errors=True)
            cfg = self._config(method.config)
            for key, value in {**dict(method.changes), **self._run(out, rate, on_gsm8k)}.items():
                OmegaConf.update(cfg, key, value, merge=False)
            if method.adapter:
                cfg.model.quantize_cache = str(self.work / "quantized")
            if name == "llama_pro":
                cfg.model.path = str(self._expanded())
            self._command(method.config, cfg, out)
            (out / "finished").touch()
        return read_metrics(out / "metrics.jsonl")

    def _run(self, out: Path, rate: float, on_gsm8k: bool) -> Changes:
        """The keys that all runs share."""
        train, held_out = self.files["train"], self.files["chosen_by"]
        steps = self.sizes.steps
        if on_gsm8k:
            assert self.gsm8k is not None
            train, held_out = self.gsm8k / "train.jsonl", self.gsm8k / "test.jsonl"
            steps = self.sizes.gsm8k_steps
        rows = {
            "_component_": "qfsdp.data.instruct_dataset",
            "prompt_column": "question",
            "answer_column": "answer",
        }
        held_out_rows = rows | {"source": str(held_out), "max_rows": self.sizes.chosen_by}
        return {
            "output_dir": str(out),
            "model.path": str(self.model),
            "model.dtype": DTYPE,
            "dataset": rows | {"source": str(train)},
            "validation": {"sets": {"chosen_by": held_out_rows}, "keep_best": False},
            "validation.eval_every": steps,
            "optimizer.lr": rate,
            "max_steps": steps,
            "max_seq_len": 512,
            "batch_size": self.sizes.batch_size,
            "gradient_accumulation_steps": 1,
            "checkpoint.every_minutes": None,
            "preflight": False,
            "metric_logger": None,
        }

    def _expanded(self) -> Path:
        """The folder of the model with 3 new blocks."""
        folder = self.work / "expanded"
        if not (folder / "config.json").exists():
            cfg = self._config("block_expansion")
            cfg.update(model={"path": str(self.model)}, output_dir=str(folder))
            cfg.update(rate=None, new_blocks=3)
            self._command("block_expansion", cfg, self.work / "expansion")
        return folder

    def _evaluate(
        self,
        name: str,
        model: Path,
        quantized_as: str,
        adapter: Path | None = None,
        shots: int = 0,
    ) -> Changes:
        out, test = self.work / f"{name}.evaluation", str(self.files["test"])
        shutil.rmtree(out, ignore_errors=True)
        cfg = self._config("evaluate")
        cfg.update(output=str(out / "results.json"), adapter=adapter and str(adapter), text={})
        cfg.model.update(path=str(model), dtype=DTYPE, quantize_cache=str(self.work / "quantized"))
        cfg.quantization.format = quantized_as
        cfg.tokenizer.path = str(self.model)
        cfg.batch_size = self.sizes.asked  # one batch: weights are dequantized once per new token
        cfg.loss = {
            "test": {"_component_": "qfsdp.data.instruct_dataset", "source": test}
            | {"prompt_column": "question", "answer_column": "answer"}
        }
        examples = {"shots": shots, "examples": str(self.files["train"])} if shots else {}
        cfg.exact_match = {
            "test": {"source": test, "max_new_tokens": self.sizes.new_tokens} | examples
        }
        self._command("evaluate", cfg, out)
        results = json.loads((out / "results.json").read_text())["results"]
        found = {(r["section"], r["metric"]): r for r in results}
        match, loss = found["exact_match", "exact_match"], found["loss", "loss"]
        low, high = match["interval"]
        figures = {"exact_match": match["value"], "exact_match_low": low, "exact_match_high": high}
        return figures if shots else figures | {"loss": loss["value"]}

    def _command(self, stem: str, cfg: Any, out: Path) -> None:
        """Runs the recipe of a shipped config with a changed config."""
        out.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, out / "changed.yaml")
        header = (ROOT / f"configs/{stem}.yaml").read_text().split("\n", 1)[0]
        recipe = ROOT / f"{header.split()[3]}.py"
        with (out / "log.txt").open("w") as log:
            command = [sys.executable, str(recipe), "--config", str(out / "changed.yaml")]
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            tail = "\n".join((out / "log.txt").read_text().splitlines()[-3:])
            raise SystemExit(f"{recipe.name} failed, see {out / 'log.txt'}\n{tail}")


def read_metrics(file: Path) -> Changes:
    """From the metrics of a run: loss on the choosing set, peak memory, speed, parameters."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    speeds = [line["tokens_per_second_per_rank"] for line in lines if "loss" in line][1:]
    losses = [v for line in lines if (v := line.get("validation/chosen_by/loss")) is not None]
    return {
        "chosen_by_loss": losses[-1],
        "peak_memory_gib": max(line.get("peak_memory_gib", 0.0) for line in lines),
        "tokens_per_second": statistics.median(speeds),
        "trained": lines[0]["memory/parameters_trained_gib"] * 2**30 / 4,  # fp32
    }


def cells(name: str, row: Changes) -> list[str]:
    def cell(key: str, form: str) -> str:
        return format(row[key], form) if key in row else "-"

    low, high = row["exact_match_low"], row["exact_match_high"]
    match = f"{row['exact_match']:.1%} ({low:.1%} to {high:.1%})"
    forms = {"lr": "g", "loss": ".4f", "gsm8k_loss": ".4f", "trained": ",.0f"}
    forms |= {"peak_memory_gib": ".2f", "tokens_per_second": ".0f"}
    return [name, match, *(cell(key, form) for key, form in forms.items())]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=None, help="folder that keeps finished parts")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K)
    args = parser.parse_args()
    sizes, rows, work = Sizes(), args.rows or ROWS, args.work or Path("runs/methods")
    if args.quick:
        sizes, rows = QUICK, args.rows or ("qlora",)
        work = args.work or Path("runs/methods_quick")
        shutil.rmtree(work, ignore_errors=True)
    made = Table(work.absolute(), sizes, args.gsm8k if args.gsm8k.is_dir() else None)
    header = ["", "exact match (95 %)", "lr", "loss", "GSM8K loss", "trained", "GiB", "tokens/s"]
    lines: list[list[str]] = [header]
    figures: Changes = {}
    for name in rows:
        row = made.row(name)
        lines.append(cells(name, row))
        figures |= {f"{name}_{key}": value for key, value in row.items()}
        print(*lines[-1], sep="  ", flush=True)
    print()
    table(lines)
    tell({}, args.json, figures)


if __name__ == "__main__":
    main()
