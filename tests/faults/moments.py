"""Random setups, and random moments of a run at which something happens to it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.faults.runs import STEPS, Setup, Workshop, logged
from tests.waiting import wait_until

MOMENTS = ("start", "step", "step", "save", "end")


def random_setup(chance: random.Random, fewest_ranks: int = 1) -> Setup:
    """A recipe on up to three ranks."""
    recipe = chance.choice(["qdora_distributed"] * 3 + ["full_finetune_distributed"])
    return Setup(recipe, chance.randint(fewest_ranks, 3))


class Running(Protocol):
    """Ranks or an agent."""

    def alive(self) -> bool: ...


class Moment:
    """An event of a run and a random delay after it: after the start, after a step, inside a save
    of a checkpoint or of the result. `str` gives it in words.

    To be created before the run is started.

    Args:
        saved: the step from which the run will go on.
    """

    def __init__(
        self, chance: random.Random, shop: Workshop, setup: Setup, run: Path, saved: int
    ) -> None:
        reference, kind = shop.reference(setup), chance.choice(MOMENTS)
        self._happened: Callable[[], bool] = lambda: True
        self._delay = chance.uniform(0, 0.05)
        if kind == "start":
            self._delay, event = chance.uniform(0, reference.load_s), "the start"
        elif kind == "step":
            step = chance.randint(min(saved + 1, STEPS), STEPS)
            self._delay, event = chance.uniform(0, 2 * reference.step_s), f"step {step}"
            log = run / "metrics.jsonl"
            # A resumed run replaces a log with later steps before its first step.
            stale = log.stat().st_ino if logged(run) > saved else 0
            self._happened = lambda: (
                log.exists() and log.stat().st_ino != stale and logged(run) >= step
            )
        elif kind == "save":
            event, folder = "the start of a save", run / "checkpoints"
            before = set(folder.glob("step_*.partial"))
            self._happened = lambda: bool(set(folder.glob("step_*.partial")) - before)
        else:
            event, name = "the start of the result's save", setup.result(run).parent.name
            self._happened = lambda: any(run.glob(f"{name}*"))
        self._words = f"{self._delay:.3f} s after {event}"

    def wait(self, ranks: Running) -> None:
        """Returns when the moment has come, or when a rank has ended."""
        wait_until(lambda: self._happened() or not ranks.alive(), self._words)
        time.sleep(self._delay)

    def __str__(self) -> str:
        return self._words
