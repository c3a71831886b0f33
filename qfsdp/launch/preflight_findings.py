"""What the check before a run has found, for the ranks that it starts: environment variables."""

from __future__ import annotations

import os

MEMORY, STEP_SECONDS = "QFSDP_ESTIMATED_MEMORY", "QFSDP_ESTIMATED_STEP_SECONDS"


def note_estimates(memory: str, step_seconds: float | None) -> None:
    """Keeps the estimated memory, in words, and the seconds of a step, None if they are not known,
    for this process and those that it starts."""
    os.environ[MEMORY] = memory
    os.environ[STEP_SECONDS] = "" if step_seconds is None else str(step_seconds)


def estimated_memory() -> str:
    """The estimated memory in words; "" without an estimate."""
    return os.environ.get(MEMORY, "")


def estimated_step_seconds() -> float | None:
    """Estimated seconds of a step; None if they are not known."""
    text = os.environ.get(STEP_SECONDS, "")
    return float(text) if text else None
