"""Signals that ask a run to end: real processes, the real agent, a stand-in for training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from qfsdp.launch import signals
from qfsdp.launch.signals import ENDING, SIGNALS, StopRequest
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import torch

import qfsdp.launch.signals
from qfsdp.launch.start import launch
from qfsdp.launch.signals import StopRequest


@dataclass
class Config:
    devices: int = 1
    last: float = 0.3  # seconds from the request to the end
    listen: bool = True
    same_request: float = 1.0  # seconds in which repeated signals are one request


def check(config: Config) -> None:
    torch.accelerator.device_count = lambda: config.devices
    qfsdp.launch.signals.SAME_REQUEST_S = config.same_request


def main(config: Config) -> None:
    qfsdp.launch.signals.SAME_REQUEST_S = config.same_request

    def say(text: str) -> None:
        os.write(1, f"{text} {os.environ.get('RANK', 0)}\\n".encode())

    if not config.listen:
        say("ready")
        time.sleep(600)
    with StopRequest() as signals:
        say("ready")
        for _ in range(60000):
            time.sleep(0.01)
            if signals.received:
                break
        say(f"{signals.received.name}")
        until = time.monotonic() + config.last
        while time.monotonic() < until:
            time.sleep(0.01)
    say("saved")


if __name__ == "__main__":
    launch(__file__, Config, check, main)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    (folder / "stand_in.py").write_text(RECIPE)
    (folder / "stand_in.yaml").write_text("devices: 1\n")
    return folder


ALONE = [sys.executable, "stand_in.py"]
TUNE = [str(Path(sys.executable).with_name("tune")), "run"]
WAYS = {
    "one process": (ALONE, [], 1),
    "its own ranks": (ALONE, ["devices=2"], 2),
    "tune": ([*TUNE, "--nproc_per_node", "2", "stand_in"], [], 2),
}
# Ranks import torch: 8 to 12 s of CPU time for each of the long ones.
EVERY_WAY = pytest.mark.parametrize(
    "way", [pytest.param(w, marks=pytest.mark.long if WAYS[w][2] > 1 else ()) for w in WAYS]
)


@contextmanager
def running(
    folder: Path, way: str, *words: str, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """The process as typed, once all its ranks are ready."""
    command, more, ranks = WAYS[way]
    process = subprocess.Popen(
        [*before, *command, "--config", "stand_in.yaml", *more, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            ranks -= line.startswith("ready")
            if ranks == 0:
                break
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("one process", signal.SIGINT),
        ("its own ranks", signal.SIGINT),
        pytest.param("tune", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_the_first_signal_lets_the_run_save_and_exit_with_0(
    recipe: Path, way: str, number: signal.Signals
) -> None:
    with running(recipe, way) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    ranks = range(WAYS[way][2])
    assert sorted(out.split("\n")[:-1]) == sorted(
        f"{what} {rank}" for what in (number.name, "saved") for rank in ranks
    )
    assert "Traceback" not in err


OTHERS = [n for n in SIGNALS if n not in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("number", [pytest.param(n, id=n.name) for n in OTHERS])
def test_other_signals_let_it_save_too_and_may_come_again(number: signal.Signals) -> None:
    ended: list[int] = []
    before = signal.signal(number, signal.SIG_DFL)  # a shell ignores SIGQUIT for what it starts
    with pytest.MonkeyPatch.context() as patch, StopRequest() as request:
        patch.setattr(os, "_exit", ended.append)
        patch.setattr("qfsdp.launch.signals.SAME_REQUEST_S", -1.0)  # none is the same request
        os.kill(os.getpid(), number)
        assert request.received is number
        if number not in ENDING:  # the kernel repeats SIGXCPU; SIGTERM may follow later
            os.kill(os.getpid(), number)
            assert not ended
    signal.signal(number, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.long
@pytest.mark.parametrize("nohup", [False, True])
def test_a_hangup_of_the_agent(recipe: Path, nohup: bool) -> None:
    """torchrun's agent would end its ranks, also under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
    with running(recipe, "its own ranks", "last=0", before=["nohup"] if nohup else []) as process:
        signal.signal(signal.SIGHUP, before)
        process.send_signal(signal.SIGHUP)
        if nohup:
            process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert out.count("SIGUSR1" if nohup else "SIGHUP") == 2 and out.count("saved") == 2


@EVERY_WAY
def test_a_second_signal_ends_it_at_once(recipe: Path, way: str) -> None:
    with running(recipe, way, f"last={LIMIT_S}") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        for _ in range(WAYS[way][2]):  # every rank has received it
            assert process.stdout.readline().startswith("SIGTERM")
        time.sleep(1.2)  # later than SAME_REQUEST_S
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)  # no rank holds the pipe any longer
    assert process.returncode == 128 + signal.SIGINT, err
    assert "saved" not in out and "Traceback" not in err


@pytest.mark.long
def test_what_launchers_send_twice_is_one_request(recipe: Path) -> None:
    words = ["last=1.5", f"same_request={LIMIT_S}"]
    with running(recipe, "its own ranks", *words) as process:
        for _ in range(4):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert out.count("saved") == 2


@EVERY_WAY
def test_before_there_is_anything_to_save_the_first_signal_ends_it(recipe: Path, way: str) -> None:
    with running(recipe, way, "listen=false") as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    killed = -signal.SIGTERM if way == "one process" else 128 + signal.SIGTERM
    assert process.returncode == killed
    assert "Traceback" not in err


@pytest.mark.long
def test_ranks_that_are_signalled_themselves(recipe: Path) -> None:
    """A batch system signals ranks too: each listens for itself."""
    with running(recipe, "its own ranks") as process:
        agent = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in agent if b"stand_in" in _command(pid)]
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert len(ranks) == 2
    assert process.returncode == 0, err
    assert out.count("saved") == 2


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_long_step_says_what_it_waits_for(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After one signal, once, on rank 0 alone."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(signals, "SLOW_S", 0.0)
    with StopRequest():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        for thread in threading.enumerate():
            if thread.name == "stop_request":
                thread.join(LIMIT_S)
    line = "SIGTERM: the run saves and ends after this step; a second signal ends it at once\n"
    assert capfd.readouterr().err == (line if rank == "0" else "")
