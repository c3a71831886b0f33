"""Fills in a cell by running it: a few steps, or a whole run and its evaluation.

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
from pathlib import Path
from statistics import median_high as median
from typing import Any

from qfsdp.common.devices import accelerator_count
from qfsdp.common.errors import UserError, shortened
from qfsdp.common.files import json_object
from qfsdp.config.recipe_files import find_recipe
from qfsdp.launch.start import check_recipe
from qfsdp.planning.estimate import rows_of
from qfsdp.planning.hardware import known_name
from qfsdp.sweep.cells import Cell
from qfsdp.sweep.results import FAILED, MEASURED, TOO_LARGE
from qfsdp.training.report.run_folder import MACHINE, read_evaluation, read_lines

# A few steps need none of these. The same samples may come again: a large batch of a small data
# set would end too early.
FEW_STEPS = (
    *("metric_logger=null", "lr_scheduler=null", "validation.sets={}", "log_every_n_steps=1"),
    *("checkpoint.every_minutes=null", "report=false", "epochs=1000000"),
)
LARGE = ("checkpoints", "adapter", "model", "best")  # folders of a few steps that nobody needs
MOST_ON_A_CPU = 8  # ranks, or one for each core
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


def run_command(
    words: Sequence[str], log: Path, devices: Sequence[str], end: signal.Signals
) -> tuple[int, str]:
    """Runs `qfsdp run WORDS`, its output in `log`; returns its exit status and its last line.

    Args:
        devices: what CUDA_VISIBLE_DEVICES gets; (): left as it is.
        end: the signal that ends the run if this process ends.
    """
    environment = dict(os.environ) | (
        {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
    )
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
    return status, reason_in(log)


def reason_in(log: Path) -> str:
    """The line that says why a run failed: the last that begins with "error:", else the last."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    errors = [line.partition("error: ")[2] for line in said if line.startswith("error: ")]
    return shortened((errors or said or ["no output"])[-1])


def measure_steps(
    cell: Cell,
    base: Sequence[str],
    folder: Path,
    ranks: int,
    steps: int,
    warmup: int,
    devices: Sequence[str],
) -> dict[str, Any]:
    """Runs `warmup + steps` updates and measures the last `steps`.

    Args:
        base: the recipe and its config, as words of a command.
        folder: of the cell; its log stays there.
        devices: for its `ranks`.

    Returns:
        As `estimate_cell`, with medians of the steps; "allocated_gib" and "memory_gib" are peaks:
        of tensors and of PyTorch's allocator on an accelerator, of the process on a CPU.
    """
    shutil.rmtree(folder, ignore_errors=True)
    words = [*base, *cell.words, *FEW_STEPS, f"max_steps={warmup + steps}", f"output_dir={folder}"]
    status, said = run_command(words, folder / "log.txt", devices, signal.SIGKILL)
    if status != 0:
        return failure(status, said)
    found = figures(cell, folder, ranks, warmup)
    for name in LARGE:
        shutil.rmtree(folder / name, ignore_errors=True)
    return found


def measure_run(
    cell: Cell,
    base: Sequence[str],
    folder: Path,
    ranks: int,
    evaluation: Sequence[str] | None,
    devices: Sequence[str],
) -> dict[str, Any]:
    """Runs the whole config, or what is left of it, then the evaluation.

    Args:
        evaluation: a config of recipes/evaluate and words for it; None: no evaluation.

    Returns:
        As `measure_steps`, and "run_seconds" of all updates, "scores": {name: [value, low, high]},
        "validation_loss" and "best_step".
    """
    words = [*base, *cell.words, f"output_dir={folder}"]
    status, said = run_whole(words, folder, devices)
    if status != 0:
        return failure(status, said)
    found = figures(cell, folder, ranks, warmup=1)
    found["run_seconds"] = sum(row["seconds_per_step"] for row in timed_steps(folder))
    found |= lowest_validation(cell.cfg.validation, folder)
    if evaluation is None:
        return found
    if (folder / "adapter").is_dir():  # it knows its base
        model = [f"adapter={folder / 'adapter'}"]
    else:
        model = [f"model.path={folder / 'model'}", f"model.dtype={cell.cfg.model.dtype}"]
        model += ["quantization.format=none"]
    return found | evaluate(evaluation, model, folder / "evaluation.json", devices)


def run_whole(words: Sequence[str], folder: Path, devices: Sequence[str]) -> tuple[int, str]:
    """As `run_command`: a whole run, or what is left of it."""
    words = [*words, "resume=auto", "log_every_n_steps=1"]
    until = time.monotonic() + SAVES_S
    status, said = run_command(words, folder / "log.txt", devices, signal.SIGTERM)
    while status != 0 and "is being written by" in said and time.monotonic() < until:
        time.sleep(1)  # the run of a killed sweep saves its state before it ends
        status, said = run_command(words, folder / "log.txt", devices, signal.SIGTERM)
    return status, said


def evaluate(
    evaluation: Sequence[str], model: Sequence[str], output: Path, devices: Sequence[str]
) -> dict[str, Any]:
    """The scores of a trained model, or why there are none.

    Args:
        evaluation: as of `measure_run`.
        model: words that name the model.
        output: file of the results.
    """
    for old in output.parent.glob(f"{output.stem}.*"):
        with suppress(OSError):
            old.unlink()
    words = ["recipes/evaluate", "--config", *evaluation, *model, f"output={output}"]
    status, said = run_command(words, output.with_suffix(".txt"), devices, signal.SIGKILL)
    if status != 0:
        return failure(status, f"evaluation: {said}")
    scores = read_evaluation(output).scores
    return {"scores": {s.name: [s.value, *(s.interval or (None, None))] for s in scores}}


def check_evaluation(evaluation: Sequence[str], training: Any, folder: Path) -> None:
    """Checks the evaluation with the base model, as it runs after hours of training only.

    Args:
        evaluation: as in `measure_run`.
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


def failure(status: int, said: str) -> dict[str, Any]:
    """The result of a run that has failed."""
    if status < 0:
        said = f"killed by {signal.Signals(-status).name}: {said}"
    signs = ("memory: ", "out of memory", "per rank hold one layer")
    large = any(sign in said.lower() for sign in signs)
    return {"status": TOO_LARGE if large else FAILED, "reason": said}


def figures(cell: Cell, folder: Path, ranks: int, warmup: int) -> dict[str, Any]:
    """Speed and memory of a run from its metrics, without the first `warmup` steps."""
    rows = timed_steps(folder)
    if not (rows := rows[warmup:] or rows):
        return {"status": FAILED, "reason": "no step was logged"}
    cfg = cell.cfg
    seconds = median([row["seconds_per_step"] for row in rows])
    samples = cfg.global_batch_size or (rows_of(cfg) * cfg.gradient_accumulation_steps * ranks)
    tokens = median([row["tokens_per_second_per_rank"] for row in rows]) * ranks
    losses = [row["loss"] for row in rows if row["loss"] is not None]  # null: not finite
    return {
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
        **({"loss": losses[-1]} if losses else {}),
    } | gpu_of(folder)


def timed_steps(folder: Path) -> list[dict[str, Any]]:
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


def visible_devices() -> list[str]:
    """The names of the accelerators that this process may use, for CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(at) for at in range(accelerator_count())]


def check_devices(devices: Sequence[str], ranks: int) -> None:
    """Raises UserError if a cell has more ranks than devices, or than a machine without any runs:
    64 ranks on two cores took 19 GB and did not come to their first step."""
    if devices and len(devices) < ranks:
        raise UserError(f"world_size: {ranks}; expected at most the {len(devices)} visible devices")
    if not devices and ranks > (most := max(MOST_ON_A_CPU, os.cpu_count() or 1)):
        raise UserError(f"world_size: {ranks}; expected at most {most} ranks without accelerators")
