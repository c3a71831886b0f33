"""Limits of the system cost one line, wherever they are met."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from qfsdp.common.errors import UserError, user_errors

ERRORS = [
    MemoryError(),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ImportError("libarrow.so: failed to map segment from shared object"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize("limit", [2**30, resource.RLIM_INFINITY])
def test_address_space(
    error: Exception,
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`ulimit -v`. Without it the error is not the user's."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    if limit == resource.RLIM_INFINITY:
        limited = "thread" in str(error)  # by `ulimit -u`
        with pytest.raises(SystemExit if limited else type(error)), user_errors():
            raise error
        return
    with pytest.raises(SystemExit), user_errors():
        raise error
    err = capsys.readouterr().err
    assert err.startswith("error: ulimit -v: 1048576 KiB") and err.count("\n") == 1


@pytest.mark.parametrize("text", ["can't start new thread", "Resource temporarily unavailable"])
def test_no_more_threads(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`ulimit -u`, or a container's limit of processes."""
    with pytest.raises(SystemExit), user_errors():
        raise RuntimeError(text)
    err = capsys.readouterr().err
    assert err.startswith("error: no thread can be started; expected") and err.count("\n") == 1


def test_a_mistake_of_all_ranks_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks of one start share a folder; another start, as after a failure, has its own."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("qfsdp.common.errors._RANK_0_GOES_FIRST_S", 0.0)

    def told(rank: int, text: str, attempt: int = 0) -> str:
        folder = tmp_path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        with pytest.raises(SystemExit) as ended, user_errors():
            raise UserError(text)
        assert ended.value.code == 2
        return capsys.readouterr().err

    lines = [told(rank, "the data is odd") for rank in (3, 0, 1, 2)]
    assert lines == ["error: rank 3: the data is odd\n", "", "", ""]
    assert told(1, "the disk is full") == "error: rank 1: the disk is full\n"
    assert told(0, "the data is odd", attempt=1) == "error: the data is odd\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone/0/error.json"))
    with pytest.raises(SystemExit), user_errors():
        raise UserError("the data is odd")
    assert "the data is odd" in capsys.readouterr().err
