"""Limits of the system cost one line, wherever they are met."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from qfsdp.common.errors import user_errors

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
        with pytest.raises(type(error)), user_errors():
            raise error
        return
    with pytest.raises(SystemExit), user_errors():
        raise error
    err = capsys.readouterr().err
    assert err.startswith("error: ulimit -v: 1048576 KiB") and err.count("\n") == 1
