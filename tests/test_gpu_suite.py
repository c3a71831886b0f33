"""`benchmarks/gpu_suite.py` on a CPU: nothing that was measured is lost, whatever ends it."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from benchmarks import gpu_suite, gpu_tests, gpu_two_ranks
from benchmarks.gpu_archive import FINISHED, Archive, Results
from benchmarks.gpu_bundle import with_one_library
from benchmarks.gpu_parts import PARTS, Part, aims, compare
from benchmarks.gpu_suite import Suite
from tests import device_branches
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent
WRITES = 'import json, sys; json.dump({"first": 1.0}, open(sys.argv[1], "w")); '


def part(folder: Path, name: str, code: str, limit: int = 600) -> Part:
    script = folder / f"{name}.py"
    script.write_text(WRITES + code)
    return Part(name, limit, (str(script), "JSON"), ())


def results_in(folder: Path) -> Results:
    file = folder / "out.zip"
    return Results(Archive(file, file), "card_code", {"card": "a card"})


def suite_in(folder: Path) -> Suite:
    return Suite(results_in(folder), mp.get_context("spawn"), folder, dry=False)


def test_failed_and_slow_parts_keep_their_figures_and_run_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        part(tmp_path, "fails", "sys.exit(3)"),
        part(tmp_path, "hangs", "import time; time.sleep(10**6)", limit=1),
        part(tmp_path, "works", "print('done')"),
    )
    suite_in(tmp_path).run_all(parts, time.monotonic() + 10**4)
    told = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line[:2] == "=="]
    assert told == ["fails:", "hangs:", "works:", "fails:", "hangs:"]
    results = results_in(tmp_path)  # from the file
    states = {p.name: results.state(p.name) for p in parts}
    assert [s["state"] for s in states.values()] == ["failed", "limit", "finished"]
    assert [s["attempts"] for s in states.values()] == [2, 2, 1] and states["fails"]["exit"] == 3
    assert all(s["card"] == "a card" and s["figures"] == {"first": 1.0} for s in states.values())
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert b"done" in archive.read("card_code/works.log")
        summary = json.loads(archive.read("card_code/summary.json"))
    assert summary == {"about": {"card": "a card"}, "figures": {"first": 1.0}}


def test_what_a_part_starts_ends_with_it(tmp_path: Path) -> None:
    child = "import subprocess; p = subprocess.Popen(['sleep', '1000000']); "
    child += "open(sys.argv[0] + '.pid', 'w').write(str(p.pid)); "
    for name, end in {"ends": "", "hangs": "p.wait()"}.items():
        suite_in(tmp_path).run(part(tmp_path, name, child + end, limit=4))
        wait_until_gone(int((tmp_path / f"{name}.py.pid").read_text()))


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists():
        stat = Path(f"/proc/{pid}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "Z":
            return
        assert time.monotonic() < end, pid
        time.sleep(0.05)


def test_the_next_part(tmp_path: Path) -> None:
    """Its limit fits; new ones come first, then interrupted ones, then failed ones."""
    results, limits = results_in(tmp_path), {"long": 100.0, "short": 10.0}
    assert results.next(limits, 99) == "short" and results.next(limits, 9) is None
    results.start("long", [])
    results.end("long", 1, 5.0)
    assert results.next(limits, 100) == "short"
    for _ in range(5):
        assert results.next(limits, 99 if "short" in results.archive.folders() else 100)
        results.start("short", [])
    assert results.next(limits, 100) == "long", "what ended five times from outside is left alone"
    results.start("long", [])
    results.end("long", None, 5.0)
    assert results.next(limits, 100) is None


def test_ratios_and_aims() -> None:
    found = {"ours_qdora_4096_seconds": 3.0, "ours_qlora_4096_seconds": 2.0}
    found |= {"ours_qlora_4096_peak_bytes": 9.0, "peft_qlora_4096_peak_bytes": 30.0}
    ratios = compare(found)
    assert ratios["qdora_over_qlora_time_4096"] == 1.5
    assert ratios["qlora_memory_over_peft_4096"] == pytest.approx(0.3)
    rows = {row[0]: row[1:] for row in aims(ratios | {"cpu_loss_difference": -0.1})}
    assert rows["qdora_over_qlora_time_4096"] == ("<= 1.05", "1.5", "MISSED")
    assert rows["qlora_memory_over_peft_4096"][2] == "met"
    assert rows["cpu_loss_difference"][2] == "MISSED"
    assert rows["tests_all_failed"][2] == "not measured"


def test_order_of_parts() -> None:
    names = [p.name for p in PARTS]
    assert len(set(names)) == len(names) and max(p.limit for p in PARTS) <= 9.5 * 60
    never_run = ["checks", "packed_rows_graphs_4096", "qwen3_5_9b_graphs_4096", "lengths"]
    never_run += [
        "qwen3_5_9b_packed_4096",
        "qwen3_5_9b_memory_4096",
        "tiled_row_32768",
        "peft_qlora_4096",
        "offload",
        "packed_rows_8192",
    ]
    measured = ["dequantize", "ours_qlora_4096", "norms", "mixture"]
    assert names[0] == "checks" and names[-1] == "tests_all"
    assert max(map(names.index, never_run)) < min(map(names.index, measured))
    for one in PARTS:  # one StepGraphs keeps its first shape
        if "gpu_train_step" in one.command[0]:
            assert one.command[one.command.index("--tokens") + 2 :][0].startswith("--")


def test_conditions_that_only_a_gpu_answers_have_a_part() -> None:
    """Each file with one; a few have a reason in place of a part."""
    files = {place.split()[0] for f in device_branches.LIBRARY.rglob("*.py")
             for place in device_branches.rewritten(f)[1]}  # fmt: skip
    parts = {one.name for one in PARTS}
    for file in files:
        asked = [part for start, part in device_branches.PARTS.items() if file.startswith(start)]
        assert asked and (asked[0] in parts or asked[0].startswith("none, ")), file


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["-S"], "lacks torch, "), (["--only", "linaer"], "invalid choice: 'linaer'")],
    ids=["packages", "name"],
)
def test_mistakes_of_a_call_cost_one_line(words: list[str], expected: str) -> None:
    """An interpreter without packages (-S), and a part that is none."""
    before = [word for word in words if word == "-S"]
    command = [sys.executable, *before, "benchmarks/gpu_suite.py", *words[len(before) :]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode and expected in last and "Traceback" not in done.stderr


# ---- tests of a GPU ----------------------------------------------------------------------------


def test_tests_are_chosen_by_their_seconds(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    tests = [f"tests/test_gpu_steps.py::test_replay[{n}]" for n in range(3)]
    tests += [f"tests/test_gpu.py::test_bits_of_one[{n}]" for n in range(20)]
    tests += ["tests/test_gpu.py::test_bits_of_two[0]", "tests/test_gpu.py::test_loading"]
    known = {tests[0]: 10.0, tests[3]: 9.0, "tests/test_gpu.py::test_bits_of_two[9]": 3.0}
    file.write_text(json.dumps({"mean": 2.0, "tests": known}))
    rates = gpu_tests.Rates(file)
    assert rates[tests[0]] == rates[tests[1]] == 10.0, "others of the function"
    assert rates["tests/test_gpu.py::test_bits_of_two[0]"] == 3.0 and rates[tests[-1]] == 2.0
    chosen = gpu_tests.first_tests(tests, rates, 60)
    assert chosen[-3:] == tests[:3], "those of graphs come last"
    assert (
        sum(rates[t] for t in chosen) <= 60 and "tests/test_gpu.py::test_bits_of_two[0]" in chosen
    )
    assert len(gpu_tests.first_tests(tests, rates, 10**6)) == 3 + 15


@pytest.mark.long
def test_the_first_tests_fit_into_their_seconds() -> None:
    """By the rates of the last run. The files of tests are found, not listed."""
    assert "tests/test_gpu_steps.py" in gpu_tests.marked_files()
    out = run_tests("--first-seconds", "100", "--collect-only")
    told = next(line for line in out.splitlines() if " tests, " in line)
    count, seconds = int(told.split()[0]), float(told.split()[2])
    assert count > 15 and seconds <= 100
    assert out.count("test_gpu_steps.py::") == out.count("test_gpu_steps.py") > 4


def run_tests(*words: str, status: int = 0) -> str:
    command = [sys.executable, "benchmarks/gpu_tests.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_stopped_run_of_tests_has_its_outcomes(tmp_path: Path) -> None:
    """The recorder on tests that pass, fail, and end the process; what passed runs once."""
    file, test = tmp_path / "tests.json", tmp_path / "test_it.py"
    test.write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_ends(): os.environ.get('GO') or os._exit(7)\n"
        "def test_fails(): assert False\ndef test_passes(): pass\n"
    )
    code = "import sys; from pathlib import Path; from benchmarks import gpu_tests; "
    code += f"gpu_tests.marked_files = lambda: [{str(test)!r}]; gpu_tests.main()"
    command = [sys.executable, "-c", code, "--json", str(file), "--name", "t", "-p", "no:randomly"]
    at = {"cwd": ROOT, "capture_output": True, "text": True}
    assert subprocess.run([*command, "--deselect", "x"], **at).returncode == 7
    outcomes = json.loads(file.read_text())["tests"]
    assert [kind for kind, _ in outcomes.values()] == ["running"]
    assert subprocess.run(command, **at).returncode == 7, "it comes last now"
    found = json.loads(file.read_text())
    assert (found["t_passed"], found["t_failed"], found["t_skipped"]) == (1, 1, 0)
    done = subprocess.run(command, **at, env=os.environ | {"GO": "1"})
    assert done.returncode == 0 and "1 failed, 1 passed" in done.stdout, done.stdout
    found = json.loads(file.read_text())
    assert (found["t_passed"], found["t_failed"], found["t_skipped"]) == (2, 1, 0)


# ---- the machine -------------------------------------------------------------------------------


def test_a_wheel_with_one_library(tmp_path: Path) -> None:
    wheel, info = tmp_path / "bitsandbytes-1.0-py3-none-any.whl", "bitsandbytes-1.0.dist-info"
    libraries = [f"bitsandbytes/libbitsandbytes_{n}.so" for n in ("cpu", "cuda130", "cuda118")]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*libraries, "bitsandbytes/__init__.py"]:
            archive.writestr(name, name)
        record = "".join(f"{name},,\n" for name in [*libraries, "bitsandbytes/__init__.py"])
        archive.writestr(f"{info}/RECORD", record)
    with_one_library(wheel)
    with zipfile.ZipFile(wheel) as archive:
        kept = [libraries[1], "bitsandbytes/__init__.py"]
        assert archive.namelist() == [*kept, f"{info}/RECORD"]
        assert archive.read(f"{info}/RECORD").decode() == "".join(f"{name},,\n" for name in kept)


@pytest.mark.long
def test_what_is_preloaded_asks_for_no_gpu() -> None:
    """A process that has asked cannot be forked: its children could not use the GPU."""
    code = "import torch\n"
    code += "def asked(*_, **__): raise AssertionError('asked for a GPU')\n"
    for name in ("cuda.is_available", "cuda.device_count", "cuda.init", "cuda._lazy_init"):
        code += f"torch.{name} = asked\n"
    for name in ("is_available", "device_count", "current_accelerator"):
        code += f"torch.accelerator.{name} = asked\n"
    code += "".join(
        f"import {name}\n" for name in [*gpu_suite.PRELOADED, "benchmarks.gpu_two_ranks"]
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_ranks_of_one_gpu_do_not_use_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU is, a mesh makes a group of its own if the group of all ranks is "gloo"."""
    gpu_two_ranks.join(0, 1, tmp_path)
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        assert mesh.get_group() is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def suite(out: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "benchmarks/gpu_suite.py", "--dry", "--minutes", "60"]
    command += ["--out", str(out), *words]
    environment = os.environ | env
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def states(file: Path) -> dict[str, Any]:
    """The state of every part in an archive."""
    if not file.exists():
        return {}
    archive = Archive(file, file)
    folders = archive.folders()
    return {p.name: Results(archive, folders[0]).state(p.name) for p in PARTS}


def killed_in(name: str, out: Path, number: int, *words: str, **env: str) -> None:
    """Starts the suite, and kills it while a part runs."""
    process, end = suite(out, *words, **env), time.monotonic() + LIMIT_S
    while not states(out).get(name):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate()
    assert states(out)[name]["state"] == "running"


@pytest.mark.long
def test_a_dry_run_that_is_killed_twice_has_every_part_once(tmp_path: Path) -> None:
    """On a machine without git; the second call gets the archive of the first."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("gcc", "g++", "cc"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    first, second = tmp_path / "first.zip", tmp_path / "second.zip"
    killed_in("ours_qlora_graphs_4096", first, signal.SIGKILL, PATH=str(tools))
    from_first = ("--from", str(first))
    killed_in("packed_rows_graphs_4096", second, signal.SIGTERM, *from_first, PATH=str(tools))
    known = states(second)
    assert known["checks"] == states(first)["checks"] and known["checks"]["exit"] == 0
    assert known["ours_qlora_graphs_4096"]["starts"] == 1, "what was interrupted waits for others"
    last = suite(second, PATH=str(tools))
    told, _ = last.communicate(timeout=LIMIT_S)
    assert last.returncode == 0, told
    found = states(second)
    assert {name: (s["state"], s["attempts"]) for name, s in found.items()} == {
        part.name: (FINISHED, 1) for part in PARTS
    }
    assert found["checks"] == known["checks"], "it did not run again"
    twice = {name for name, state in found.items() if state["starts"] == 2}
    assert twice == {"ours_qlora_graphs_4096", "packed_rows_graphs_4096"}, "those that were killed"
    assert "norms_16_chunk_24_seconds" in found["norms"]["figures"]
    assert found["ours_qlora_graphs_4096"]["card"] == "cpu" and "two_ranks_loss_difference" in told
    again = suite(second)
    told, _ = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0 and "==" not in told
