"""Held-out losses of several adapters in one run: each as in a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from qfsdp.distributed.world import World
from qfsdp.modules.adapters.several import AdapterRows
from qfsdp.training.metrics import RunLog
from qfsdp.training.several import single
from qfsdp.training.throughput import Meter
from qfsdp.training.validation import Validation


class SeveralValidation:
    """A `Validation` of every adapter, which keeps its best state in `adapters/NAME/best`.

    Args:
        steps: number of updates of each, by name.

    Attributes:
        progress: what a resumed run continues from, of all adapters.
    """

    def __init__(self, cfg: Any, world: World, output_dir: Path, steps: Mapping[str, int]) -> None:
        self.progress: dict[str, Any] = {}
        self._steps, self._each = dict(steps), dict[str, Validation]()
        for name, total in steps.items():
            one = Validation(single(cfg, name), world, output_dir / "adapters" / name, total)
            self._each[name] = one
            self._note(name)

    def _note(self, name: str) -> None:
        """Takes an adapter's progress into that of all: checkpoints have one mapping."""
        mine = self._each[name].progress
        self.progress |= {f"{name}/{key}": value for key, value in mine.items()}

    def run(
        self,
        step: int,
        model: nn.Module,
        log: RunLog,
        meter: Meter,
        saves: Mapping[str, Callable[[Path], None]],
    ) -> None:
        """As `Validation.run`, for every adapter that is trained in this step. Metrics are
        `NAME/validation/...`.

        Args:
            saves: by name, writes the adapter to a folder.
        """
        rows = cast(AdapterRows, model.adapter_rows)
        for name, one in self._each.items():
            if step <= self._steps[name]:
                rows.counts = [int(other == name) for other in rows.names]  # every row is its own
                one.progress.update({key: self.progress[f"{name}/{key}"] for key in one.progress})
                one.run(step, model, cast(RunLog, _Log(log, name)), meter, saves[name])
                self._note(name)


class _Log:
    """A log in which an adapter's numbers have its name."""

    def __init__(self, log: RunLog, name: str) -> None:
        self._log, self._name = log, name

    def log_apart(self, step: int, metrics: dict[str, float], text: str) -> None:
        named = {f"{self._name}/{key}": value for key, value in metrics.items()}
        self._log.log_apart(step, named, f"adapter {self._name}: {text}")

    def say(self, text: str) -> None:
        self._log.say(f"adapter {self._name}: {text}")
