"""Writes the metrics of a run to `metrics.jsonl`, a metric logger and the terminal."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from qfsdp.cli.component import Component
from qfsdp.cli.config import to_yaml
from qfsdp.cli.errors import UserError


class MetricLogger(Protocol):
    """The interface of torchtune's metric loggers (TensorBoard, disk, stdout, W&B, ...)."""

    def log_dict(self, payload: dict[str, Any], step: int) -> None: ...
    def close(self) -> None: ...


def write_run_files(output_dir: Path, cfg: Any, recipe_file: str, rank: int = 0) -> None:
    """Writes the whole config and the recipe's file to the run's directory, on rank 0.

    Raises:
        UserError: the directory cannot be written.
    """
    if rank != 0:
        return
    try:
        (output_dir / "config.yaml").write_text(to_yaml(cfg))
        (output_dir / "recipe.py").write_text(Path(recipe_file).read_text())
    except OSError as error:
        raise UserError(f"output_dir: '{output_dir}' cannot be written: {error}") from None


class RunLog:
    """Logs the metrics of one run on rank 0; does nothing on other ranks.

    Each logged step is a line of `<output_dir>/metrics.jsonl`, a call of the metric logger, and the
    text beside a progress bar, or a printed line if standard error is not a terminal. The text
    leaves out metrics with a `/` in their name.

    Args:
        output_dir: exists already.
        logger: a torchtune metric logger as the config names it, or None.
        first_step: number of steps before a resumed run, 0 for a new one. Lines of later steps,
            left by a killed run, are removed: these steps run again.
        total_steps: of the whole run.
        rank: of this process.
    """

    def __init__(
        self,
        output_dir: Path,
        logger: Component | None,
        first_step: int,
        total_steps: int,
        rank: int = 0,
    ) -> None:
        self._silent = rank != 0
        self._bar: tqdm[Any] | None = None
        if self._silent:
            return
        _drop_after(first_step, output_dir / "metrics.jsonl")
        self._file = open(output_dir / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self._logger: MetricLogger | None = logger.build() if logger is not None else None
        self._total = total_steps
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def advance(self) -> None:
        """Moves the progress bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of a step; steps count from 1."""
        if self._silent:
            return
        self._record(step, metrics)
        shown = ((name, value) for name, value in metrics.items() if "/" not in name)
        text = "  ".join(f"{name} {value:.4g}" for name, value in shown)
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            print(f"step {step}/{self._total}  {text}", file=sys.stderr, flush=True)

    def log_apart(self, step: int, metrics: dict[str, float], text: str) -> None:
        """Records metrics that belong to no training step, and prints `text`."""
        if not self._silent:
            self._record(step, metrics)
            tqdm.write(text, file=sys.stderr)  # above the bar, if there is one

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        with suppress(OSError):  # a full disk: the line stays in the buffer for the next write
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._logger is not None:
            self._logger.log_dict(metrics, step=step)

    def say(self, text: str) -> None:
        """Prints a line on rank 0."""
        if not self._silent:
            print(text)

    def close(self) -> None:
        """Flushes everything."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.close()
        if self._logger is not None:
            self._logger.close()
        self._file.close()


def _drop_after(step: int, file: Path) -> None:
    """Removes the lines of later steps, and a line that was not written to its end."""
    if not file.exists():
        return
    lines = file.read_text().splitlines()
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    if kept != lines:
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text("".join(f"{line}\n" for line in kept))
        os.replace(partial, file)
