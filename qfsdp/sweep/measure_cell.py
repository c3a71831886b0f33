"""Fills in cells by running them: a few steps, or a whole run and its evaluation.

Every run is a process of its own, on the devices that it is given, so a crash or an exhausted GPU
ends one cell and nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high as median
from typing import Any

from qfsdp.common.errors import UserError, shortened
from qfsdp.common.files import json_object
from qfsdp.config.recipe_files import find_recipe, recipe_file_of
from qfsdp.config.tool_config import Training
from qfsdp.launch.start import check_recipe
from qfsdp.planning.estimate import rows_of
from qfsdp.planning.hardware import known_name
from qfsdp.sweep.cells import Cell
from qfsdp.sweep.results import FAILED, MEASURED, TOO_LARGE, Row
from qfsdp.training.report.run_folder import MACHINE, read_evaluation, read_lines

# A few steps need none of these. The same samples may come again: a large batch of a small data
# set would end too early.
FEW_STEPS = (
    *("metric_logger=null", "lr_scheduler=null", "validation.sets={}", "log_every_n_steps=1"),
    *("checkpoint.every_minutes=null", "report=false", "epochs=1000000"),
)
LARGE = ("checkpoints", "adapter", "model", "best")  # folders of a few steps that nobody needs
SAVES_S = 60.0  # a run that is ended needs at most this long to save its state
# The run dies with the sweep, however that ends: else the same command, started again, would meet
# its lock. `prctl(PR_SET_PDEATHSIG)` outlives `exec`; other systems than Linux do not have it.
DIES_WITH_PARENT = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
except AttributeError:
    pass
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Runs:
    """Runs of a sweep's cells. Each gives the result of a cell: as `estimate_cell`, with medians of
    the steps. "allocated_gib" and "memory_gib" are peaks then: of tensors and of PyTorch's
    allocator on an accelerator, of the process on a CPU.

    Fields:
        training: the base config.
        folder: of the cells; the files and the log of a run stay in a folder of it.
        ranks: of a run.
        evaluation: a config of recipes/evaluate and words for it; None: no evaluation.
        devices: what CUDA_VISIBLE_DEVICES gets; (): left as it is.
    """

    training: Training
    folder: Path
    ranks: int
    evaluation: Sequence[str] | None = None
    devices: Sequence[str] = ()

    def steps(self, cell: Cell, steps: int, warmup: int) -> Row:
        """Runs `warmup + steps` updates and measures the last `steps`."""
        folder = self.folder / cell.key
        shutil.rmtree(folder, ignore_errors=True)
        words = [*self._base, *cell.words, *FEW_STEPS, f"max_steps={warmup + steps}"]
        words += [f"output_dir={folder}"]
        if failure := self._run(words, folder / "log.txt", signal.SIGKILL):
            return failure
        found = figures(cell, folder, self.ranks, warmup)
        for name in LARGE:
            shutil.rmtree(folder / name, ignore_errors=True)
        return found

    def whole(self, cell: Cell) -> Row:
        """Runs the whole config, or what is left of it, then the evaluation. See `finished`."""
        folder = self.folder / cell.key
        if failure := self.train([*self._base, *cell.words], folder):
            return failure
        if (folder / "adapter").is_dir():  # it knows its base
            model = [f"adapter={folder / 'adapter'}"]
        else:
            model = [f"model.path={folder / 'model'}", f"model.dtype={cell.cfg.model.dtype}"]
            model += ["quantization.format=none"]
        return self.finished(cell, folder, model, folder / "evaluation.json")

    @property
    def _base(self) -> list[str]:
        argv = self.training.argv
        return [*self.torchrun, recipe_file_of(argv[1]), *argv]

    @property
    def torchrun(self) -> list[str]:
        return ["--nproc_per_node", str(self.ranks)] if self.ranks > 1 else []

    def train(self, words: Sequence[str], folder: Path) -> Row:
        """Runs a whole training in `folder`, or what is left of it. Returns as `_run`."""
        words = [*words, f"output_dir={folder}", "resume=auto", "log_every_n_steps=1"]
        until = time.monotonic() + SAVES_S
        failure = self._run(words, folder / "log.txt", signal.SIGTERM)
        while "is being written by" in failure.get("reason", "") and time.monotonic() < until:
            time.sleep(1)  # the run of a killed sweep saves its state before it ends
            failure = self._run(words, folder / "log.txt", signal.SIGTERM)
        return failure

    def finished(
        self, cell: Cell, folder: Path, model: Sequence[str], output: Path, of_several: int = 0
    ) -> Row:
        """The result of a cell whose training has ended, with its evaluation.

        Args:
            folder: of the training.
            model: words that name what it has trained.
            output: file of the evaluation.
            of_several: the cell is one of so many adapters of the training, by its key, and has its
                share of the seconds. 0: it is the cell's own.

        Returns:
            As the class says, and "run_seconds" of all updates, "scores": {name: [value, low,
            high]}, "validation_loss" and "best_step".
        """
        found, name = figures(cell, folder, self.ranks, warmup=1), ""
        if "reason" in found:
            return found
        found["run_seconds"] = sum(row["seconds_per_step"] for row in timed_steps(folder))
        if of_several:
            name = f"{cell.key}/"
            own = [row for row in read_lines(folder / "metrics.jsonl") if f"{name}loss" in row]
            found = {key: value for key, value in found.items() if key != "loss"}
            found |= {"steps": len(own)} | last_loss(own, f"{name}loss")
            for key in ("run_seconds", "seconds_per_step"):
                found[key] /= of_several
            found["samples_per_second"] *= of_several
        found |= lowest_validation(cell.cfg.validation, folder, name)
        return found if self.evaluation is None else found | self._scores(model, output)

    def _scores(self, model: Sequence[str], output: Path) -> Row:
        """The "scores" of a trained model, or why there are none."""
        for old in output.parent.glob(f"{output.stem}.*"):
            with suppress(OSError):
                old.unlink()
        words = ["recipes/evaluate", "--config", *(self.evaluation or ()), *model]
        words += [f"output={output}"]
        if failure := self._run(words, output.with_suffix(".txt"), signal.SIGKILL, "evaluation: "):
            return failure
        scores = read_evaluation(output).scores
        return {"scores": {s.name: [s.value, *(s.interval or (None, None))] for s in scores}}

    def _run(self, words: Sequence[str], log: Path, end: signal.Signals, what: str = "") -> Row:
        """Runs `qfsdp run WORDS`, its output in `log`.

        Args:
            end: the signal that ends the run if this process ends.
            what: begins the reason of a failure.

        Returns:
            {}, or "status" and "reason" of a run that has failed.
        """
        environment = dict(os.environ)
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        qfsdp = [sys.executable, "-m", "qfsdp.cli.command", "run", *words]
        command = [sys.executable, "-c", DIES_WITH_PARENT, str(int(end)), *qfsdp]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
            try:
                status = child.wait()
            except BaseException:
                child.send_signal(end)
                child.wait()
                raise
        if status == 0:
            return {}
        said = what + reason_in(log)
        if status < 0:
            said = f"killed by {signal.Signals(-status).name}: {said}"
        signs = ("memory: ", "out of memory", "per rank hold one layer")
        large = any(sign in said.lower() for sign in signs)
        return {"status": TOO_LARGE if large else FAILED, "reason": said}


def reason_in(log: Path) -> str:
    """The line that says why a run failed: the last that begins with "error:", else the last."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    errors = [line.partition("error: ")[2] for line in said if line.startswith("error: ")]
    return shortened((errors or said or ["no output"])[-1])


def check_evaluation(evaluation: Sequence[str], training: Any, folder: Path) -> None:
    """Checks the evaluation with the base model, as it runs after hours of training only.

    Args:
        evaluation: as of `Runs`.
        training: the config of the runs.
        folder: of the sweep.

    Raises:
        UserError: recipes/evaluate refuses the config.
    """
    recipe = find_recipe("recipes/evaluate")
    assert recipe is not None
    model = [f"model.path={training.model.path}", f"model.dtype={training.model.dtype}"]
    words = [*model, "adapter=null", f"output={folder / 'evaluation.json'}"]
    try:
        check_recipe(recipe, ["--config", *evaluation, *words])
    except UserError as error:
        raise UserError(f"evaluation: {error}") from None


def figures(cell: Cell, folder: Path, ranks: int, warmup: int) -> Row:
    """Speed and memory of a run from its metrics, without the first `warmup` steps."""
    rows = timed_steps(folder)
    if not (rows := rows[warmup:] or rows):
        return {"status": FAILED, "reason": "no step was logged"}
    cfg = cell.cfg
    seconds = median([row["seconds_per_step"] for row in rows])
    samples = cfg.global_batch_size or (rows_of(cfg) * cfg.gradient_accumulation_steps * ranks)
    tokens = median([row["tokens_per_second_per_rank"] for row in rows]) * ranks
    return (
        {
            "status": MEASURED,
            "allocated_gib": max(row["peak_memory_gib"] for row in rows),
            "memory_gib": max(
                row.get("memory/peak_reserved_gib") or row["peak_memory_gib"] for row in rows
            ),
            "seconds_per_step": seconds,
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens,
            "steps": len(rows),
            "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        | last_loss(rows, "loss")
        | gpu_of(folder)
    )


def last_loss(rows: Sequence[Row], key: str) -> dict[str, float]:
    """The last loss of some lines of metrics; {} if none is finite (null)."""
    losses = [row[key] for row in rows if row[key] is not None]
    return {"loss": losses[-1]} if losses else {}


def timed_steps(folder: Path) -> list[Row]:
    """The lines of a run's metrics that are of a step."""
    return [row for row in read_lines(folder / "metrics.jsonl") if "seconds_per_step" in row]


def lowest_validation(config: Any, folder: Path, prefix: str = "") -> dict[str, float]:
    """The lowest loss of the set that decides, and its step; {} without validation.

    Args:
        config: section `validation` of the run in `folder`.
        prefix: begins the names of its metrics.
    """
    if not config.sets:
        return {}
    name = (config.metric or next(iter(config.sets))).partition("/")[0]
    key, lines = f"{prefix}validation/{name}/loss", read_lines(folder / "metrics.jsonl")
    losses = [(row[key], row["step"]) for row in lines if row.get(key) is not None]
    if not losses:
        return {}
    loss, step = min(losses)
    return {"validation_loss": loss, "best_step": step}


def gpu_of(folder: Path) -> dict[str, str]:
    """The GPU that a run has used, as "gpu", for its price; {} if it is not a known one."""
    with suppress(UserError):
        return {"gpu": known_name(str(json_object(folder / MACHINE).get("device", "")))}
    return {}
