"""Text of any kind stands above the bar, on terminals of many sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.terminals import screen_of
from tests.tiny import ROOT

NOISE = """
import logging, sys, threading, warnings
log = logging.getLogger("theirs")
log.addHandler(logging.StreamHandler())
from qfsdp.training.step_display import step_display
from qfsdp.common.long_waits import long_wait
from qfsdp.common.terminal import close_bar, say
display = step_display(6, 0)
def noise(step):
    if step == 1: print("a print"); print("a part", end=""); print(" of a line")
    if step == 2: log.warning("a record of logging")
    if step == 3: warnings.warn("a warning", stacklevel=1)
    if step == 4:
        threads = [threading.Thread(target=print, args=(f"thread {at}",)) for at in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
    if step == 5: say("said"); print("to stderr", file=sys.stderr)
for step in range(1, 7):
    noise(step)
    metrics = {"loss": 1.25, "grad_norm": 0.5, "lr": 1e-4, "peak_memory_gib": 23.14}
    display.show(step, metrics | {"tokens_per_second_per_rank": 4123.0})
    display.advance()
print("no end", end="")
close_bar()
print("after the bar")
"""
TEXTS = ["a print", "a part of a line", "a record of logging", "said", "to stderr", "no end"]
FIELDS = ["loss 1.250", "norm 0.500", "lr 1.0e-4", "4.1k tok/s", "23.1 GiB"]


@pytest.mark.parametrize(
    "columns",
    [pytest.param(40, marks=pytest.mark.long), 80, pytest.param(160, marks=pytest.mark.long)],
)
def test_text_stands_above_the_bar(columns: int) -> None:
    lines = [line for line in screen_of(NOISE, columns) if line]
    *above, bar, after = lines
    assert after == "after the bar"
    assert bar.startswith("6/6 |") or columns == 40, bar
    assert len(bar) <= columns
    shown = [field for field in FIELDS if field in bar]
    assert shown == FIELDS[: len(shown)] and (len(shown) == 5 or columns == 40), bar
    if columns == 160:
        assert bar.count("█") == 60
    for text in TEXTS:
        assert above.count(text) == 1, (text, above)
    assert sum("a warning" in line for line in above) >= 1
    assert sorted(line for line in above if "thread" in line) == [f"thread {n}" for n in range(4)]
    assert not any("|" in line for line in above), above


def test_a_terminal_without_a_size_gets_lines() -> None:
    lines = screen_of(NOISE, columns=0, rows=0)
    steps = [line for line in lines if " step " in line]
    assert len(steps) == 6 and all(field in steps[0] for field in FIELDS)
    assert steps[0][2] == steps[0][5] == ":" and "left" in steps[4]  # 21:33:05
    assert all(text in lines for text in TEXTS[:-1])


def test_other_ranks_write_over_the_bar_and_not_behind_it() -> None:
    script = """
from qfsdp.common.terminal import close_bar, keep_below
print("the bar of rank 0", end="", flush=True)
keep_below(None)
print("of rank 1")
close_bar()
"""
    assert screen_of(script, 80) == ["of rank 1", ""]


def test_a_reader_that_stops_is_no_error() -> None:
    """`qfsdp ls | head -1`: without a traceback, here and at the exit of Python."""
    words = [sys.executable, "-u", "-m", "qfsdp.cli.command", "ls"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = subprocess.Popen(words, cwd=ROOT, **pipes)  # type: ignore[call-overload]
    command.stdout.close()
    assert command.communicate()[1] == ""
    assert command.returncode == 0
