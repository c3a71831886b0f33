"""A recipe started by itself: its processes, its mistakes and its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from qfsdp.common import progress
from qfsdp.launch.ranks import share_cores
from qfsdp.launch.start import launch
from tests.cli.stand_in import ROOT, STEP, Result, run, write_stand_in
from tests.waiting import LIMIT_S


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    write_stand_in(root, "here")
    return root


def recipe(checkout: Path, *words: str, **env: str) -> Result:
    file = "recipes/stand_in.py"
    return run(sys.executable, file, *STEP, *words, cwd=checkout, PYTHONPATH=str(ROOT), **env)


def test_one_device_runs_in_this_process(checkout: Path) -> None:
    result = recipe(checkout, "model.path=m")
    assert (result.status, result.out) == (0, ["here preflight", "here rank 0 of 1: m"])


@dataclass
class Seed:
    seed: int


def test_the_phases_of_a_dry_run_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first forward of the run itself may compile: it is told, and has the longer limit."""
    ended: list[set[str]] = []

    def check(_: Seed) -> None:
        with progress.phase("forward"):
            pass
        ended.append({*progress.NOW.ended})

    (tmp_path / "config.yaml").write_text("seed: 0\n")
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--config", str(tmp_path / "config.yaml")])
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    launch("recipe.py", Seed, check, lambda _: ended.append({*progress.NOW.ended}))
    assert "forward" in ended[0] and ended[1] == set()
    assert progress.NOW.phase == "loading"


def test_two_devices_start_two_ranks(checkout: Path) -> None:
    result = recipe(checkout, "devices=2")
    assert result.status == 0, result.err
    assert result.out == ["here preflight", "here rank 0 of 2: llama", "here rank 1 of 2: llama"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fail=check", "error: model.path: no such directory"),
        ("fale=check", "error: unknown key 'fale'; did you mean 'fail'?"),
        ("fail=user", "error: the data is odd"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(checkout: Path, word: str, message: str) -> None:
    result = recipe(checkout, word)
    assert (result.status, result.err) == (2, f"{message}\n")


@pytest.mark.parametrize(
    ("word", "status", "errors"),
    [
        ("fail=user", 2, ["error: the data is odd"]),
        pytest.param(
            "fail=user on 1", 2, ["error: rank 1: the data is odd"], marks=pytest.mark.long
        ),
        pytest.param("fail=crash on 0", 1, [], marks=pytest.mark.long),
    ],
)
def test_failing_ranks(checkout: Path, word: str, status: int, errors: list[str]) -> None:
    result = recipe(checkout, "devices=2", word)
    assert (result.status, result.errors) == (status, errors), result.err
    assert ("Traceback" in result.err) == (status == 1)
    assert ("ValueError: a bug" in result.err) == (status == 1)


@pytest.mark.long
def test_a_user_error_uses_up_no_restarts(checkout: Path) -> None:
    flags = ["--nproc_per_node", "2", "--max-restarts", "3"]
    command = [str(Path(sys.executable).with_name("tune")), "run", *flags, "recipes/stand_in"]
    for word, status, starts in (("fail=user", 2, 1), ("fail=crash on 0", 1, 4)):
        result = run(*command, *STEP, word, cwd=checkout, PYTHONPATH=str(ROOT))
        assert result.status == status, result.err
        assert result.err.count("starting all ranks again") == starts - 1, result.err


@pytest.mark.parametrize(
    ("ranks", "threads", "compilers"), [(4, "16", "16"), (1, "64", "32"), (99, "1", "1")]
)
def test_ranks_share_the_cores(
    ranks: int, threads: str, compilers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr("qfsdp.common.devices.core_limit", lambda: None)
    share_cores(ranks)
    assert [os.environ[name] for name in names] == [threads, compilers]
    monkeypatch.setenv(names[1], "7")
    share_cores(ranks)
    assert os.environ[names[1]] == "7"


@pytest.mark.long
def test_ctrl_c_ends_all_ranks(checkout: Path) -> None:
    words = [sys.executable, "recipes/stand_in.py", *STEP, "devices=2", "fail=crash on 7"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "waits" in line:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()  # ends when no rank holds the pipe any longer
        assert process.wait(timeout=LIMIT_S) == 128 + signal.SIGINT
