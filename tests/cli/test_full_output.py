"""What is printed, on a disk that is full: it is lost, and the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qfsdp.cli import full_output
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PRINTS = """
import logging, sys
from qfsdp.cli.full_output import outlive_full_disk
outlive_full_disk()
for number in range(3000):
    print("out", number, flush=number == 7)
    print("err", number, file=sys.stderr)
logging.getLogger("qfsdp").warning("a warning")
print("buffered until the end")
open(sys.argv[1], "w").write("complete")
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("full", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_process_goes_on(full: tuple[str, ...], tmp_path: Path) -> None:
    with open("/dev/full", "w") as disk:
        streams = {name: disk if name in full else subprocess.PIPE for name in ("stdout", "stderr")}
        words = [sys.executable, "-c", PRINTS, str(tmp_path / "end")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, env=environment, text=True, timeout=LIMIT_S, **streams)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "end").read_text() == "complete"
    if "stdout" not in full:
        assert done.stdout.splitlines()[-1] == "buffered until the end"
    if "stderr" not in full:
        assert done.stderr.splitlines()[-1] == "a warning"
        assert len(done.stderr.splitlines()) == 3001


def test_a_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = os.open(tmp_path / "log.txt", os.O_WRONLY | os.O_CREAT)
    output, write, full = full_output._Output(file), os.write, [False]

    def limited(number: int, data: bytes) -> int:
        if full[0]:
            raise OSError(full_output.FULL[0], "No space left on device")
        return write(number, data)

    monkeypatch.setattr(full_output.os, "write", limited)
    for text, is_full in ((b"a\n", False), (b"b\n", True), (b"c\n", True), (b"d\n", False)):
        full[0] = is_full
        assert output.write(text) == 2
    output.write(b"e\n")
    monkeypatch.undo()
    os.close(file)
    assert (tmp_path / "log.txt").read_bytes() == b"a\n" + full_output.MISSING + b"d\ne\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_result_that_is_lost_is_an_error() -> None:
    words = [sys.executable, "-m", "qfsdp.cli.command", "ls"]
    with open("/dev/full", "w") as disk:
        done = subprocess.run(
            words, cwd=ROOT, stdout=disk, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
    expected = "error: standard output: a part is lost: no space left on device\n"
    assert (done.returncode, done.stderr) == (2, expected)
