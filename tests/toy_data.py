"""Components for configs of runs on the tiny model, which need no files."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.waiting import wait_until


def tokenizer() -> Any:
    return SimpleNamespace(pad_id=0)


class Samples:
    """`size` random samples of 5 to 40 tokens, about half of them targets.

    Args:
        hold_file: while this file exists, a process reads `hold_after` samples and then waits, for
            tests that interrupt a run. It waits until the file is gone, or until the process is
            asked to stop (SIGTERM or SIGINT).
    """

    def __init__(
        self,
        tokenizer: Any,
        size: int = 26,
        seed: int = 0,
        hold_file: str | None = None,
        hold_after: int = 19,
    ) -> None:
        self.size, self.seed = size, seed
        self._hold_file, self._left = hold_file and Path(hold_file), hold_after

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._left -= 1
        if self._hold_file and self._left < 0:
            file = self._hold_file
            wait_until(lambda: not file.exists() or _asked_to_stop(), f"{file} is removed")
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        length = int(torch.randint(5, 40, (1,), generator=generator))
        tokens = torch.randint(0, 577, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 2] = -100
        return {"tokens": tokens, "labels": labels}


def _asked_to_stop() -> bool:
    """Whether the run's StopRequest has received a signal."""
    request = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(request, "received", None) is not None
