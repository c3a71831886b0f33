"""Rows are tokenized also where no process can be started."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from qfsdp.data import tokenize_processes
from qfsdp.data.tokenize_processes import in_order


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOENT, errno.ENOSPC])
@pytest.mark.parametrize("at_once", [False, True])
def test_without_shared_memory(
    number: int, at_once: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/shm is read-only, missing or full, so semaphores cannot be made."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    monkeypatch.setattr(tokenize_processes, "ALONE_S", -1.0)
    found = in_order(lambda start, stop: (start, stop), 5, 2, processes=2, at_once=at_once)
    assert list(found) == [(0, 2), (2, 4), (4, 5)]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and os.strerror(number) in told
