"""A tokenizer and a dataset without files, for configs of runs on the tiny model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.waiting import wait_until

# The keys that tests of training runs share; `{folder}` has the model.
TOY_CONFIG = """
model: {{path: {folder}/model, dtype: fp32}}
tokenizer: {{_component_: tests.toy_data.tokenizer}}
dataset: {{_component_: tests.toy_data.Samples}}
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-3, eps: 1e-6, fused: true}}
max_seq_len: 64
preflight: false
report: false
"""
TOY_PAIRS = TOY_CONFIG.replace("tests.toy_data.Samples", "tests.preferences.preferences")


class Tokenizer:
    """What a run needs of a tokenizer whose dataset has tokens already."""

    pad_id = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        raise NotImplementedError("the samples have tokens already")


def tokenizer() -> Tokenizer:
    return Tokenizer()


class Samples:
    """`size` random samples of 5 to 40 tokens, about half of them targets.

    For tests that interrupt a run, $TESTS_HOLD_FILE names a file with the path of the run's
    metrics.jsonl. While it exists, reading waits once this process has logged three steps, so that
    a run takes three or four. A process that is asked to stop (SIGTERM, SIGINT) waits no longer.
    """

    def __init__(self, tokenizer: Any, size: int = 26, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        file = os.environ.get("TESTS_HOLD_FILE")
        self._hold = None if file is None else Path(file)
        self._logged = self._log_lines()

    def _log_lines(self) -> int:
        """Lines of the run's log; 0 where there is no log, or no hold file any longer."""
        try:
            log = Path(self._hold.read_text()) if self._hold else Path()
            return len(log.read_text().splitlines())
        except OSError:
            return 0

    def _may_go_on(self) -> bool:
        return self._log_lines() < self._logged + 3 or asked_to_stop()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._hold is not None:
            wait_until(self._may_go_on, f"{self._hold} is removed")
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        length = int(torch.randint(5, 40, (1,), generator=generator))
        tokens = torch.randint(0, 577, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 2] = -100
        return {"tokens": tokens, "labels": labels}


def asked_to_stop() -> bool:
    """Whether the run's StopRequest has received a signal."""
    request = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(request, "received", None) is not None
