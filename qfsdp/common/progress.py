"""What this process does now: the step, the phase, and how often it has moved on.

The watchdog (`qfsdp.launch.watchdog`) reads it. Whoever does a long piece of work in parts calls
`moved` after each part, so that slow work is not taken for a hang. A call takes 0.04 us, a phase
2 us.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """The place of this process in its run.

    Fields:
        step: the current training step; 0 before the first.
        phase: what runs now, or "after X" between two phases.
        moves: grows whenever the process moves on.
        part: what the phase works on, such as "model.layers.7"; "" if it has not said.
        ended: phases that have ended once. The first time of a phase may compile or load.
    """

    step: int = 0
    phase: str = "loading"
    moves: int = 0
    part: str = ""
    ended: set[str] = field(default_factory=set)


NOW = Progress()
_outer: list[str] = []


def begin() -> None:
    """Forgets what was before the run. In a dry run of a step phases end that compile nothing."""
    NOW.__dict__.update(Progress().__dict__)
    _outer.clear()


def moved(part: str = "") -> None:
    """Says that a part of a long piece of work is done; `part` names the one that comes next."""
    NOW.moves += 1
    NOW.part = part or NOW.part


def at_step(step: int) -> None:
    """Says that training step `step` begins."""
    NOW.step = step
    moved()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Names the work of a `with` block. After an exception the phase stays the one that raised."""
    _outer.append(NOW.phase)
    NOW.phase, NOW.part = name, ""
    moved()
    yield
    before = _outer.pop()
    NOW.ended.add(name)
    NOW.phase, NOW.part = before if _outer else f"after {name}", ""
    moved()


def layer_begins(name: str, layer: Any, args: Any) -> None:
    """A hook of forward, of the layer `name`."""
    moved(name)


def layer_ends(name: str, layer: Any, args: Any, result: Any) -> None:
    """The hook after it; that of the result's gradient tells when backward begins."""
    NOW.part = ""  # what follows may be no part of a step
    x = result[0] if isinstance(result, tuple | list) else result  # OpenAI GPT's return lists
    if getattr(x, "requires_grad", False):
        x.register_hook(lambda gradient: moved(name))
