"""A line for what takes long, and none for what does not."""

from __future__ import annotations

import threading

import pytest

from qfsdp.common import long_waits as slow
from qfsdp.common import progress
from qfsdp.common.long_waits import long_wait
from tests.waiting import wait_until


def test_what_takes_long_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""

    def told() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return printed == "reading ...\n"

    with long_wait("reading", seconds=0):
        wait_until(told, "the line is printed")


def test_what_is_quick_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with long_wait("reading", seconds=3600):
        pass
    for thread in threading.enumerate():
        if thread.name == "long_wait":
            thread.join()  # it ends with the block
    assert capsys.readouterr().err == ""


def test_a_line_every_so_many_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """An estimate is never silent for longer, however long it takes."""
    progress.begin()  # a model of another test may have named a layer
    printed = ""

    def told() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return printed.count("reading ... 0 s\n") > 3

    with long_wait("reading", seconds=0, every=0.001):
        wait_until(told, "the line is printed again at once")


def test_what_takes_very_long_is_told_again_with_its_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "SLOW_S", 0.001)
    monkeypatch.setattr(slow, "LONGEST_SILENCE_S", 0.002)
    printed = ""

    def told() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return printed.count("\n") > 3

    with progress.phase("loading"):
        progress.moved("model.layers.7")
        progress.moved()
        with long_wait("reading", seconds=0):
            wait_until(told, "the line is printed again and again")
    assert "reading ... 0 s, at model.layers.7\n" in printed
    assert slow.where() == "", "the phase is over"
