"""`qfsdp doctor`: a crash or a hang is one red row, and its JSON file names nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qfsdp.cli.doctor import checks, run
from tests.tiny import ROOT

# A module in place of the checks: what it does depends on the name of the check.
STAND_IN = """
import json, os, signal, sys, time
folder, _, _, *names = sys.argv[1:]
for name in names:
    rank = os.environ.get("RANK", "0")
    if name == "links":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "gather" and rank == "1":
        time.sleep(600)
    if name == "kernels":
        sys.exit("no such device")
    state = "red" if name == "host" else "green"
    row = {"state": state, "text": name, "advice": None, "figures": {"pid": os.getpid()}}
    with open(f"{folder}/{name}.{rank}.part", "w") as file:
        json.dump(row, file)
    os.rename(f"{folder}/{name}.{rank}.part", f"{folder}/{name}.{rank}.json")
    if state == "red":
        break
"""


def test_crashes_and_hangs_are_one_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "MODULE", "stand_in")
    monkeypatch.setattr(run, "SHARE", 60)  # 4 s for each check
    found = {row.name: row for row in run.rows(tmp_path, 2, 240)}
    states = {name: row.state for name, row in found.items()}
    red = {"host", "links", "kernels", "gather"}
    assert states == {name: "red" if name in red else "green" for name in run.CHECKS}
    assert "SIGSEGV" in found["links"].text
    assert "no such device" in found["kernels"].text
    assert "not finished within" in found["gather"].text
    for row in found.values():  # nothing is left running
        with pytest.raises(ProcessLookupError):
            os.kill(row.figures.get("pid", 2**22 + 1), 0)


def test_what_is_attached_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setenv("LOGNAME", "jane")
    monkeypatch.setenv("HF_TOKEN", "abcdefgh")
    host = os.uname().nodename
    text = f"/home/jane/x: [{host}]: 10.1.2.3:29500 token abcdefgh hf_0123456789 of jane, 2.13.0"
    assert run.anonymous(text) == "~/x: [***]: ***:29500 token *** *** of ***, 2.13.0"


def test_file_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    df = tmp_path / "df"
    df.write_text("#!/bin/sh\n[ -d $2 ] && echo Type && echo nfs4\n")
    df.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    case = checks.Case(tmp_path, 0)
    assert checks._file_system(case, tmp_path / "new") == "nfs4 (network)"
    df.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks._file_system(case, tmp_path) == "unknown"


def doctor(*words: str, **environment: str) -> tuple[int, str, list[dict[str, object]]]:
    output = next(word.partition("=")[2] for word in words if word.startswith("output="))
    command = [sys.executable, "-m", "qfsdp.cli.command", "doctor", "seconds=300", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    rows = json.loads(Path(output).read_text())["rows"]
    assert "Traceback" not in ended.stdout + ended.stderr
    return ended.returncode, ended.stdout, rows


@pytest.mark.long
def test_two_ranks_on_a_machine_that_works(tmp_path: Path) -> None:
    status, text, rows = doctor("ranks=2", f"output={tmp_path}/doctor.json")
    assert status == 0 and "nothing is red" in text, text
    found = {row["name"]: row for row in rows}["all_ranks"]
    assert found["figures"]["off"] <= 1e-5  # type: ignore[index]


# torch says that there is a card, but nothing runs on it.
UNUSABLE = """
import torch
def fails(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = fails
"""


@pytest.mark.long
def test_an_unusable_card_and_a_broken_folder_are_red(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNUSABLE)
    (tmp_path / "file").touch()
    broken = {"PYTHONPATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file")}
    status, text, rows = doctor("ranks=2", f"output={tmp_path}/doctor.json", **broken)
    states = {row["name"]: row["state"] for row in rows}
    assert status == 1 and text.count("advice:") == 2, text
    assert [name for name, state in states.items() if state == "red"] == ["cards", "compiler"]
    assert "card 0 of 1: CUDA error: no kernel image" in text
