"""Writes the metrics of a run to `metrics.jsonl`, a metric logger and the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qfsdp
from qfsdp.common.devices import accelerator
from qfsdp.common.files import write_json, write_text, writing
from qfsdp.common.printable import printable
from qfsdp.common.terminal import close_bar, keep_below
from qfsdp.config.load import to_yaml
from qfsdp.data.loader import MapDataset
from qfsdp.data.stream import Loader
from qfsdp.distributed.world import World
from qfsdp.training.metric_logger import MetricLogger
from qfsdp.training.metric_logger import build_logger as build_logger
from qfsdp.training.metric_logger import check_logger as check_logger
from qfsdp.training.metrics_file import MetricsFile
from qfsdp.training.report.at_end import report_at_end
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
