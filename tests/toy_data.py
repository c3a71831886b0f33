"""Components for configs of runs on the tiny model, which need no files."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch


def tokenizer() -> Any:
    return SimpleNamespace(pad_id=0)


class Samples:
    """`size` random samples of 5 to 40 tokens, about half of them targets.

    Args:
        seconds: what reading one takes, for runs that are to be interrupted.
    """

    def __init__(self, tokenizer: Any, size: int = 26, seed: int = 0, seconds: float = 0.0) -> None:
        self.size, self.seed, self.seconds = size, seed, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        length = int(torch.randint(5, 40, (1,), generator=generator))
        tokens = torch.randint(0, 577, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 2] = -100
        return {"tokens": tokens, "labels": labels}
