"""A process goes on when its output fails: a full disk, a closed pipe, a terminal that is gone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from qfsdp.common import output as streams
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PRINTS = """
import logging, sys
from qfsdp.common.output import outlive_output_errors
outlive_output_errors()
for number in range(3000):
    print("out", number, flush=number == 7)
    print("err", number, file=sys.stderr)
logging.getLogger("qfsdp").warning("a warning")
print("the end")
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
        assert done.stdout.splitlines()[-1] == "the end"
    if "stderr" not in full:
        assert done.stderr.splitlines()[-1] == "a warning"
        assert len(done.stderr.splitlines()) == 3001


def test_a_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = os.open(tmp_path / "log.txt", os.O_WRONLY | os.O_CREAT)
    output, write, full = streams._Output(file), os.write, [False]

    def limited(number: int, data: bytes) -> int:
        if full[0]:
            raise OSError(streams.FULL[0], "No space left on device")
        return write(number, data)

    monkeypatch.setattr(streams.os, "write", limited)
    for text, is_full in ((b"a\n", False), (b"b\n", True), (b"c\n", True), (b"d\n", False)):
        full[0] = is_full
        assert output.write(text) == 2
    output.write(b"e\n")
    monkeypatch.undo()
    os.close(file)
    assert (tmp_path / "log.txt").read_bytes() == b"a\n" + streams.MISSING + b"d\ne\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_result_that_is_lost_is_an_error() -> None:
    words = [sys.executable, "-m", "qfsdp.cli.command", "ls"]
    with open("/dev/full", "w") as disk:
        done = subprocess.run(
            words, cwd=ROOT, stdout=disk, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
    expected = "error: standard output: a part is lost: no space left on device\n"
    assert (done.returncode, done.stderr) == (2, expected)


LOSES = """
import logging, os, sys
from pathlib import Path
kept = logging.StreamHandler()  # as torch keeps one
from qfsdp.common.output import check_output, outlive_output_errors, print_to
logging.getLogger("kept").addHandler(kept)
outlive_output_errors()
print_to(Path(sys.argv[1]))
opened = os.open(os.devnull, os.O_RDONLY)
assert opened > 2, "a file took the place of a closed stream"
for number in range(3000):
    print("out", number)
    print("err", number, file=sys.stderr)
    print("\\r bar", end="", file=sys.stderr, flush=True)
logging.getLogger("kept").warning("a warning")
print("a name: \u00e9")
sys.stdout.flush()
(Path(sys.argv[1]) / "end").write_text("complete")
check_output()
"""


def _lose(how: str, folder: Path) -> int:
    """The status of `LOSES` with its output lost in a way that a shell can make."""
    program = f'{sys.executable} -c "$LOSES" {folder}'
    ways = {
        "head": f"{program} 2>&1 | head -5 >{folder}/read; exit ${{PIPESTATUS[0]}}",
        "closed": f"{program} >&- 2>&- <&-",
        "read only": f"{program} >/dev/null 2</dev/null",
        "limit": f"ulimit -f 8; {program} >{folder}/read",
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOSES": LOSES}
    words = ["bash", "-c", ways[how]]
    return subprocess.run(words, env=environment, timeout=LIMIT_S, capture_output=True).returncode


@pytest.mark.parametrize(
    ("how", "status"), [("head", 1), ("closed", 0), ("read only", 0), ("limit", 1)]
)
def test_what_nobody_reads_goes_to_the_folder_of_the_run(
    how: str, status: int, tmp_path: Path
) -> None:
    assert _lose(how, tmp_path) == status  # 1: `check_output` has raised
    assert (tmp_path / "end").read_text() == "complete"
    if how == "limit":
        return  # the same limit holds for the file
    said = (tmp_path / streams.FILE).read_text()
    assert "it goes on here\n" in said and "err 2999\n" in said and "a warning\n" in said
    assert "bar" not in said
    if how != "read only":
        assert "out 2999\n" in said and "a name: \u00e9\n" in said


def test_a_terminal_that_is_gone(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    words = [sys.executable, "-c", LOSES.replace("opened =", "input(); opened ="), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.PIPE, stdout=its, stderr=its
    )
    os.close(its)
    os.close(ours)
    process.communicate(b"go on\n", timeout=LIMIT_S)
    assert (tmp_path / "end").read_text() == "complete"
    assert "Input/output error; it goes on here\n" in (tmp_path / streams.FILE).read_text()
    assert process.returncode == 1


def test_ascii_gets_escapes_of_other_characters() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    script = "from qfsdp.common.output import *; outlive_output_errors(); print('/runs/\u00e9')"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"/runs/\\xe9\n")


def test_lines_keep_their_order_and_survive_a_kill() -> None:
    script = "import os, sys; from qfsdp.common.output import *; outlive_output_errors()\n"
    script += "for n in 1, 2: print(f'mine {n}'); print(f'step {n}', file=sys.stderr)\nos._exit(9)"
    words, environment = [sys.executable, "-c", script], os.environ | {"PYTHONPATH": str(ROOT)}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, env=environment, check=False, timeout=LIMIT_S, **both)
    assert done.stdout.splitlines() == ["mine 1", "step 1", "mine 2", "step 2"]
