"""What the terminal shows of training steps: a bar with five fields, or lines with a time stamp.

     12/300 |██▌             | 14:20 left  loss 1.234  norm 0.52  lr 1.0e-4  4.1k tok/s  23.1 GiB

All metrics are in `metrics.jsonl` and the metric logger.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm
from tqdm.std import Bar

from qfsdp.common.terminal import is_terminal, keep_below, screen

LEAST_BAR, MOST_BAR = 8, 60  # columns
RECENT_STEPS = 50  # the time that is left follows from these


def short_fields(metrics: Mapping[str, float]) -> list[str]:
    """Loss, gradient norm, learning rate, tokens per second of all ranks, and peak memory of one:
    those that `metrics` has, as short texts."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    words = {
        "loss": lambda x: f"loss {_digits(x, 4)}",
        "grad_norm": lambda x: f"norm {_digits(x, 3)}",
        "lr": lambda x: "lr " + f"{x:.1e}".replace("e-0", "e-").replace("e+00", ""),
        "tokens_per_second_per_rank": lambda x: f"{_thousands(x * ranks)} tok/s",
        "peak_memory_gib": lambda x: f"{_digits(x, 3)} GiB",
    }
    return [word(metrics[name]) for name, word in words.items() if name in metrics]


def _digits(number: float, count: int) -> str:
    """`count` significant digits: "0.520", "123"."""
    return f"{number:#.{count}g}".rstrip(".")


def _thousands(number: float) -> str:
    """ "412", "4.1k", "41k" or "4.1M"."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f}{unit}"
    return f"{number:.0f}"


def fit(count: str, fields: Sequence[str], columns: int) -> tuple[str, int]:
    """The fields as one text, and the width of a bar that fills the line between `count` and them.

    A narrow line has single spaces, then loses fields from the end.
    """
    for most, gap in [(len(fields), "  "), *((n, " ") for n in range(len(fields), -1, -1))]:
        text = gap.join(fields[:most])
        width = columns - len(f"{count} || {text}")
        if width >= LEAST_BAR:
            break
    return text, max(0, min(width, MOST_BAR))


class Pace:
    """Estimates the time that is left from the last steps. The first one is left out: it compiles
    kernels and fills caches."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)

    def advance(self) -> None:
        """Notes the end of a step."""
        self._ends.append(time.perf_counter())

    def left(self, step: int) -> list[str]:
        """After `step`: ["14:20 left"]; nothing before two steps have ended, and at the end."""
        if len(self._ends) < 2 or step >= self._total:
            return []
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return [f"{duration((self._total - step) * seconds)} left"]


def duration(seconds: float) -> str:
    """ "0:42", "14:20", "3:05:20" or "2d 03:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class StepBar(tqdm):  # type: ignore[type-arg]
    """The bar of a training run; text that is printed meanwhile goes above it."""

    def __init__(self, total: int, first: int) -> None:
        self._fields: list[str] = []
        self._pace = Pace(total)
        super().__init__(total=total, initial=first, file=screen(), dynamic_ncols=True, miniters=1)
        keep_below(self)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step, beside the bar from its next move on."""
        self._fields = short_fields(metrics)

    def advance(self) -> None:
        """Moves the bar by one step."""
        self._pace.advance()
        self.update()

    def __str__(self) -> str:
        drawn: dict[str, Any] = self.format_dict
        step, total, columns = drawn["n"], drawn["total"], drawn["ncols"] or 80
        count = f"{step:>{len(str(total))}}/{total}"
        text, width = fit(count, self._pace.left(step) + self._fields, columns)
        if not width:
            return f"{count} {text}"[:columns]
        filled = Bar(step / total, width, Bar.ASCII if drawn["ascii"] is True else Bar.UTF)
        return f"{count} |{filled}| {text}"


class StepLines:
    """A line for each logged step, where there is no terminal: 21:33:05 step 3/300 ..."""

    def __init__(self, total: int) -> None:
        self._total, self._pace = total, Pace(total)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of a step."""
        fields = [f"step {step}/{self._total}", *short_fields(metrics), *self._pace.left(step)]
        print(time.strftime("%H:%M:%S"), "  ".join(fields), file=sys.stderr, flush=True)

    def advance(self) -> None:
        """Notes the end of a step."""
        self._pace.advance()


def step_display(total: int, first: int) -> StepBar | StepLines:
    """The bar on a terminal; lines on anything else, and on a terminal without a size."""
    return StepBar(total, first) if is_terminal() else StepLines(total)
