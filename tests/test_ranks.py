"""`run_ranks` tells failures of a function from crashes of a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.ranks import run_ranks


def crash(marker: Path, times: int, number: int) -> str:
    """Ends rank 1 by a signal in its first `times` runs."""
    if os.environ["RANK"] == "1" and len(list(marker.iterdir())) < times:
        (marker / str(len(list(marker.iterdir())))).touch()
        os.kill(os.getpid(), number)
    return "done"


def test_ranks_that_crash_run_once_more(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 1: SIGABRT; run again"):
        assert run_ranks(2, crash, tmp_path, 1, signal.SIGABRT) == ["done", "done"]


def test_ranks_that_crash_twice_fail(tmp_path: Path) -> None:
    with pytest.warns(UserWarning), pytest.raises(mp.ProcessExitedException, match="SIGSEGV"):
        run_ranks(2, crash, tmp_path, 2, signal.SIGSEGV)
    assert len(list(tmp_path.iterdir())) == 2


def test_killed_ranks_fail_at_once(tmp_path: Path) -> None:
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(2, crash, tmp_path, 1, signal.SIGKILL)


def fail() -> None:
    raise ValueError("a mistake")


def test_an_exception_fails_at_once() -> None:
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: a mistake"):
        run_ranks(1, fail)
