"""`run_ranks` tells failures of a function from crashes of a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
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


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_ranks_fail_at_once() -> None:
    """Alone: a peer may fail first as it loses its connection."""
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(1, killed)


def fail() -> None:
    raise ValueError("a mistake")


def test_an_exception_fails_at_once() -> None:
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: a mistake"):
        run_ranks(1, fail)


def fail_beside_a_crash() -> None:
    """Rank 0 fails first; rank 1 crashes when it is asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    dist.barrier()
    if os.environ["RANK"] == "0":
        raise RuntimeError("connection reset by peer")
    signal.pause()


def test_a_crash_is_told_before_the_errors_of_its_peers() -> None:
    crashed = pytest.raises(mp.ProcessExitedException, match="process 1 .* signal SIGSEGV")
    with pytest.warns(UserWarning, match="rank 1: SIGSEGV; run again"), crashed:
        run_ranks(2, fail_beside_a_crash)
