"""Held-out losses of several adapters in one run: each as in a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
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
            mine = _Part(self.progress, f"{name}/")
            mine.update(one.progress)
            one.progress = cast(dict[str, Any], mine)
            self._each[name] = one

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
                one.run(step, model, cast(RunLog, _Log(log, name)), meter, saves[name])


class _Part(MutableMapping[str, Any]):
    """The entries of a dict whose keys have a prefix, without it."""

    def __init__(self, whole: dict[str, Any], prefix: str) -> None:
        self._whole, self._prefix = whole, prefix

    def __getitem__(self, key: str) -> Any:
        return self._whole[self._prefix + key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._whole[self._prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self._whole[self._prefix + key]

    def __iter__(self) -> Iterator[str]:
        mine = (key for key in self._whole if key.startswith(self._prefix))
        return (key.removeprefix(self._prefix) for key in mine)

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Log:
    """A log in which an adapter's numbers have its name."""

    def __init__(self, log: RunLog, name: str) -> None:
        self._log, self._name = log, name

    def log_apart(self, step: int, metrics: dict[str, float], text: str) -> None:
        named = {f"{self._name}/{key}": value for key, value in metrics.items()}
        self._log.log_apart(step, named, f"adapter {self._name}: {text}")

    def say(self, text: str) -> None:
        self._log.say(f"adapter {self._name}: {text}")
