"""Writes the metrics of a run to `metrics.jsonl`, a metric logger and the terminal.

`metrics.jsonl` has one line of strict JSON per logged step, whatever happens to disk or process.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qfsdp
from qfsdp.common.devices import accelerator
from qfsdp.common.files import to_json, whole_file, why, write_json, write_text, writing
from qfsdp.common.printable import printable
from qfsdp.common.terminal import close_bar, keep_below, warn
from qfsdp.config.load import to_yaml
from qfsdp.data.loader import MapDataset
from qfsdp.data.stream import Loader
from qfsdp.distributed.world import World
from qfsdp.training.metric_logger import MetricLogger
from qfsdp.training.metric_logger import build_logger as build_logger
from qfsdp.training.metric_logger import check_logger as check_logger
from qfsdp.training.report.sections import report_at_end
from qfsdp.training.step_display import step_display
from qfsdp.training.summary import summary, trained_figures


def write_run_files(output_dir: Path, cfg: Any, recipe_file: str, rank: int = 0) -> None:
    """Writes the whole config, the recipe's file and where it runs (`machine.json`) to the run's
    directory, on rank 0. Raises UserError: the directory cannot be written."""
    if rank != 0:
        return
    with writing("output_dir", output_dir):
        write_text(output_dir / "config.yaml", to_yaml(cfg))
        write_text(output_dir / "recipe.py", Path(recipe_file).read_text(encoding="utf-8"))
        about = {"recipe": Path(recipe_file).stem} | machine()
        write_json(output_dir / "machine.json", about)


def machine() -> dict[str, Any]:
    """Where this process runs: numbers of ranks, the device, and versions."""
    accelerated = accelerator() is not None
    return {
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "device": torch.get_device_module().get_device_name() if accelerated else "cpu",
        "qfsdp": qfsdp.__version__,
        "torch": torch.__version__,
    }


class RunLog:
    """Logs the metrics of one run on rank 0; does nothing on other ranks.

    Each logged step is a line of `<output_dir>/metrics.jsonl`, a call of the metric logger, and
    five fields beside a progress bar, or a printed line if standard error is not a terminal
    (`qfsdp.training.step_display`). What is printed until `close` goes above the bar. A full disk
    or a metric logger that fails costs a warning, and training goes on.

    Args:
        output_dir: exists already.
        logger: as `build_logger` returns it; closed by `close`.
        first_step: number of steps before a resumed run, 0 for a new one. Lines of later steps,
            left by a killed run, are removed: these steps run again.
        total_steps: of the whole run.
        rank: of this process.
    """

    def __init__(
        self,
        output_dir: Path,
        logger: MetricLogger | None,
        first_step: int,
        total_steps: int,
        rank: int = 0,
    ) -> None:
        self._silent = rank != 0
        if self._silent:
            return keep_below(None)
        self._output_dir, self._first, self._total = output_dir, first_step, total_steps
        self._once: dict[str, float] = {}  # what the first line of a run has besides
        self._file = MetricsFile(output_dir / "metrics.jsonl", first_step)
        self._logger = logger
        self._display = step_display(total_steps, first_step)

    def introduce(
        self,
        cfg: Any,
        model: nn.Module,
        loader: Loader,
        world: World,
        held_out: Mapping[str, MapDataset] | None = None,
    ) -> None:
        """Prints what is trained, on which data and in how many steps (`summary`)."""
        if not self._silent:
            lines = summary(cfg, model, loader, world, self._first, self._total, held_out)
            self._once = trained_figures(model) if self._first == 0 else {}
            print(lines, file=sys.stderr, flush=True)

    def advance(self) -> None:
        """Moves the progress bar by one step."""
        if not self._silent:
            self._display.advance()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of a step; steps count from 1."""
        if not self._silent:
            self._record(step, metrics)
            self._display.show(step, metrics)

    def log_apart(self, step: int, metrics: dict[str, float], text: str) -> None:
        """Records metrics that belong to no training step, and prints `text`."""
        if not self._silent:
            self._record(step, metrics)
            print(text, file=sys.stderr, flush=True)

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        metrics, self._once = metrics | self._once, {}
        self._file.add(step, metrics)
        if self._logger is not None:
            self._logger.log_dict(metrics, step=step)

    def say(self, text: str) -> None:
        """Prints a line on rank 0."""
        if not self._silent:
            print(printable(text), flush=True)

    def close(self, report: bool = False) -> None:
        """Ends the progress bar, closes the metric logger, and writes what is left.

        Args:
            report: also write the run's page and the picture of its losses (`report_at_end`).
        """
        close_bar()
        if self._silent:
            return
        if self._logger is not None:
            self._logger.close()
        self._file.close()
        if report:
            report_at_end(self._output_dir)


KEPT_LINES = 10_000  # lines of about 1 KB that wait for space
BATCH_LINES = 100  # written at once; on a full disk every step tries again to write the first


class MetricsFile:
    """Appends lines of JSON to a file.

    A line that cannot be written (a full disk) is kept, and written before the next one as soon as
    there is space again. So the file has no cut line, and a gap only after `KEPT_LINES` lines
    without space, or if the run ends without. It is opened for every line: a file that somebody
    moved away begins anew.

    Args:
        first_step: of a resumed run. Lines of later steps are removed, as these steps run again,
            and so is every line that is no metrics of a step.

    Raises:
        UserError: the file cannot be read, or not be written without these lines.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._waiting: deque[str] = deque()
        self._lost = 0
        self._failed = False  # the last write
        with writing("output_dir", path):
            _drop_after(first_step, path)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a step, with null for NaN and infinity."""
        if len(self._waiting) == KEPT_LINES:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(to_json({"step": step, **metrics}) + "\n")
        self._write()

    def close(self) -> None:
        """Says how many lines the file lacks, if any."""
        if self._waiting:
            self._write()
        if missing := len(self._waiting) + self._lost:
            warn(f"'{self._path}' lacks {missing} lines, which could not be written")

    def _write(self) -> None:
        """Appends the waiting lines, until one cannot be written."""
        try:
            while self._waiting:
                batch = list(islice(self._waiting, BATCH_LINES))
                _append(self._path, "".join(batch).encode())
                for _ in batch:
                    self._waiting.popleft()
        except OSError as error:
            if not self._failed:
                warn(
                    f"'{self._path}' cannot be written: {why(error)}; training goes on, and "
                    f"up to {KEPT_LINES} lines wait until it can be written again"
                )
            self._failed = True
            return
        if self._failed:
            warn(f"'{self._path}' is written again; {self._lost or 'no'} lines are lost")
        self._failed = False


def _append(path: Path, data: bytes) -> None:
    """Writes all of `data`, or leaves the file as it was: a full disk takes a part of a line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _drop_after(step: int, file: Path) -> None:
    """Keeps the lines up to `step`; other lines, damaged ones too, are removed."""
    if not file.exists():
        return
    found = file.read_bytes()
    kept = b"".join(line + b"\n" for line in found.splitlines() if _is_metrics(line, step))
    if kept != found:
        with whole_file(file) as partial:
            partial.write_bytes(kept)


def _is_metrics(line: bytes, last_step: int) -> bool:
    """Whether it is a line of metrics of a step up to `last_step`."""
    try:
        written: Any = json.loads(line)
        return bool(written["step"] <= last_step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
