"""`benchmarks/gpu_suite.py` on a CPU: nothing that was measured is lost, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_suite
from benchmarks.gpu_suite import Part, Results, compare, run
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent
WRITES = 'import json, sys; json.dump({"first": 1.0}, open(sys.argv[1], "w")); '


def part(name: str, code: str, limit: int = 600) -> Part:
    return Part(name, limit, ("-c", WRITES + code, "JSON"), ())


def state_of(folder: Path, name: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def run_all(parts: tuple[Part, ...], results: Results) -> list[str]:
    """The names of the parts that ran, in order."""
    ran = []
    while chosen := results.next_part(parts, 600):
        run(chosen, results, dict(os.environ), tiny=False)
        results.summarize(parts, None)
        ran.append(chosen.name)
    return ran


def test_failed_and_slow_parts_keep_their_figures_and_run_once_more(tmp_path: Path) -> None:
    results = Results(tmp_path, tiny=True)
    parts = (
        part("fails", "sys.exit(3)"),
        part("hangs", "import time; time.sleep(10**6)", limit=1),
        part("works", "print('done')"),
    )
    assert run_all(parts, results) == ["fails", "hangs", "works", "fails", "hangs"]
    states = {p.name: results.state(p) for p in parts}
    assert [s["state"] for s in states.values()] == ["failed", "limit", "finished"]
    assert [s["attempts"] for s in states.values()] == [2, 2, 1] and states["fails"]["exit"] == 3
    assert results.figures((parts[1],)) == {"first": 1.0}
    assert "done" in (results.folder / "works.log").read_text()
    summary = json.loads((results.folder / "summary.json").read_text())
    assert summary["parts"]["hangs"] == "limit" and summary["figures"] == {"first": 1.0}
    assert summary["about"]["commit"] in results.folder.name


def test_what_a_part_starts_ends_with_it(tmp_path: Path) -> None:
    child = "import subprocess; p = subprocess.Popen(['sleep', '1000000']); print(p.pid); "
    results = Results(tmp_path, tiny=True)
    for name, end in {"ends": "", "hangs": "sys.stdout.flush(); p.wait()"}.items():
        run(part(name, child + end, limit=2), results, dict(os.environ), tiny=False)
        pid = int((results.folder / f"{name}.log").read_text().split()[-1])
        wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists():
        stat = Path(f"/proc/{pid}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "Z":
            return
        assert time.monotonic() < end, pid
        time.sleep(0.05)


def test_a_part_starts_only_if_its_limit_fits(tmp_path: Path) -> None:
    long, short = part("long", "", limit=100), part("short", "", limit=10)
    results = Results(tmp_path, tiny=True)
    assert results.next_part((long, short), 99) == short
    assert results.next_part((long, short), 100) == long
    assert results.next_part((long, short), 9) is None


def test_tests_that_fail_are_counted_and_do_not_run_again(tmp_path: Path) -> None:
    results = Results(tmp_path, tiny=True)
    code = "print('3 failed, 97 passed, 1 skipped in 9 s'); sys.exit(1)"
    counted = replace(part("tests", code), kind="tests")
    assert run_all((counted,), results) == ["tests"]
    figures = results.state(counted)["figures"]
    assert figures == {"tests_failed": 3, "tests_passed": 97, "tests_skipped": 1}


def test_ratios() -> None:
    found = {"ours_qdora_2048_seconds": 3.0, "ours_qlora_2048_seconds": 2.0}
    found |= {"ours_qlora_2048_tokens_per_second": 9.0, "ours_qlora_8192_tokens_per_second": 10.0}
    ratios = compare(found)
    assert ratios["qdora_over_qlora_time_2048"] == 1.5
    assert ratios["short_over_long_tokens"] == pytest.approx(0.9)
    assert "qlora_over_peft_tokens" not in ratios


def test_parts_can_be_started() -> None:
    """Every file and every option of a part exists; `--try` runs the parts themselves."""
    names = [p.name for p in gpu_suite.PARTS]
    assert len(set(names)) == len(names) and names[:4] == [
        "norms",
        "tests_first",
        "dequantize",
        "scaled_mm",
    ]
    assert max(p.limit for p in gpu_suite.PARTS) <= 8 * 60
    for one in gpu_suite.PARTS:
        if one.kind != "tests":
            assert (ROOT / one.command[0]).is_file(), one
        else:
            assert all((ROOT / word).is_file() for word in one.command if word.startswith("tests/"))


def suite(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"QFSDP_EAGER_KERNELS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/gpu_suite.py", "--try", "--minutes", "30"]
    command += ["--out", str(tmp_path / "out"), "--copy-to", str(tmp_path / "copy"), *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_killed_suite_goes_on(tmp_path: Path) -> None:
    """The literal command with three real parts, killed within the second one."""
    names = ("norms", "scaled_mm", "offload")
    first = suite(tmp_path, "--only", *names)
    end = time.monotonic() + LIMIT_S
    while not (found := list((tmp_path / "out").glob("*/scaled_mm.log"))):
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    folder = found[0].parent
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = state_of(folder, "norms")
    assert before["state"] == "finished"
    assert state_of(folder, "scaled_mm")["state"] == "running"
    copied = tmp_path / "copy" / folder.name
    assert json.loads((copied / "summary.json").read_text())["figures"]["norms_16_seconds"] > 0

    second = suite(tmp_path, "--only", *names)
    told, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, told
    assert "== norms" not in told and "== scaled_mm" in told and "== offload" in told
    assert state_of(folder, "norms") == before
    assert state_of(folder, "scaled_mm")["attempts"] == 2
    summary = json.loads((copied / "summary.json").read_text())
    assert {"norms_16_seconds", "256x256_fp8_error", "disk_loss_difference"} <= set(
        summary["figures"]
    )
    third = suite(tmp_path, "--only", *names)
    told, _ = third.communicate(timeout=LIMIT_S)
    assert third.returncode == 0 and "==" not in told
