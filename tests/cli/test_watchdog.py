"""The watchdog: what counts as a hang, and who is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from qfsdp.common import progress
from qfsdp.common.errors import InvalidField
from qfsdp.common.sizes import format_duration, parse_duration
from qfsdp.launch.watchdog import AGENT, HANG_STATUS, DistributedConfig, Look, Watchdog, absent
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
LOOK = Look(number=1, quiet=30, limit=20, step=7, phase="forward", calls={"0": 5})


@pytest.mark.parametrize(
    ("text", "seconds"), [("20s", 20), ("10min", 600), ("2 h", 7200), (45, 45), ("1.5", 1.5)]
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1s", "10 minutes", "nan", "inf", "1e30h", "s", "1h2"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidField, match=r"timeout: .* expected a duration such as 20s"):
        DistributedConfig(timeout=text).check()


def test_format_duration() -> None:
    assert [format_duration(s) for s in (20, 90, 600, 9000)] == ["20 s", "90 s", "10 min", "2.5 h"]


def watchdog(silent: dict[int, float], looks: dict[int, Look]) -> Watchdog:
    """The watchdog of rank 0, which has heard `looks` of others so many seconds ago."""
    found = Watchdog(DistributedConfig("20s", "40s"), None, 0, len(silent) + 1)
    found.silent_seconds = silent
    found.texts = {rank: json.dumps(asdict(look)).encode() for rank, look in looks.items()}
    return found


@pytest.mark.parametrize(
    ("silent", "other", "hangs"),
    [
        (0.0, LOOK, True),  # both wait
        (0.0, replace(LOOK, quiet=3), False),  # the other moves on, so this one waits for it
        (18.0, replace(LOOK, quiet=3), True),  # it was last heard of 18 s ago: it is stopped
        (0.0, replace(LOOK, limit=40), False),  # it compiles for the first time
        (20.0, replace(LOOK, quiet=0, limit=40), True),  # it was stopped while it did
        (19.0, replace(LOOK, quiet=0, limit=40), False),
        (39.0, None, False),  # it has not started yet
        (40.0, None, True),
        (0.0, replace(LOOK, quiet=3, where="in wait, a.py:1"), True),  # it has seen the hang
    ],
)
def test_a_run_hangs_when_no_rank_moves_on(silent: float, other: Look | None, hangs: bool) -> None:
    of_rank_0 = watchdog({1: silent}, {1: other} if other else {})
    looks = {0: LOOK, **({1: other} if other else {})}
    assert of_rank_0.is_hung(looks) == hangs
    still = replace(LOOK, quiet=19)
    if other is None or not other.where:
        assert not of_rank_0.is_hung(looks | {0: still}), "rank 0 itself moves on"


def test_the_ranks_that_did_not_arrive() -> None:
    behind = replace(LOOK, calls={"0": 4}, where="in __getitem__, samples.py:31", pid=77)
    looks = {0: LOOK, 1: behind, 2: LOOK}
    assert absent(looks, []) == [1]
    assert absent(looks, [2]) == [2], "who does not answer may be the reason for the others"
    assert absent({0: LOOK, 1: LOOK}, []) == []
    lines = "\n".join(watchdog({1: 0.0, 2: 0.0}, {}).report(looks))
    assert "hangs in step 7: no rank has moved on for 20 s (distributed.timeout)" in lines
    assert "rank 1 did not arrive: in step 7, forward; host " in lines
    assert "process 77; in __getitem__, samples.py:31" in lines
    assert "waiting in step 7, forward: ranks 0, 2" in lines


def test_phases_have_a_longer_limit_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "NOW", progress.Progress())
    monkeypatch.setattr("qfsdp.launch.watchdog.NOW", progress.NOW)
    dog = watchdog({}, {})
    limits = [dog.look(1.0)[0].limit]
    for _ in range(2):
        with progress.phase("forward"):
            limits.append(dog.look(1.0)[0].limit)
    limits.append(dog.look(1.0)[0].limit)
    assert limits == [40, 40, 20, 20]
    assert progress.NOW.phase == "after forward"
    assert dog.look(5.0)[0].quiet == 5
    progress.moved()
    assert dog.look(5.0)[0].quiet == 0


def test_a_long_step_is_told_every_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "NOW", progress.Progress(step=2, ended={"backward"}))
    for module in ("launch.watchdog", "common.long_waits"):
        monkeypatch.setattr(f"qfsdp.{module}.NOW", progress.NOW)
    dog = watchdog({}, {})
    for name in ("forward", "backward"):  # the clock tells the first time of a phase
        with progress.phase(name):
            progress.moved("model.layers.7")
            for _ in range(25):
                dog.tell(5.0)
    told = [f"step 2: backward ... {seconds} s, at model.layers.7" for seconds in (60, 120)]
    assert capsys.readouterr().err.splitlines() == told


ALONE = """
import time
from types import SimpleNamespace
from qfsdp.common import progress
from qfsdp.launch.watchdog import DistributedConfig, watched

def read_rows():
    time.sleep(600)

config = SimpleNamespace(distributed=DistributedConfig(0.2, 0.2), output_dir="run")
with watched(config):
    progress.at_step(3)
    with progress.phase("data"):
        read_rows()
"""


def test_a_process_that_hangs_alone(tmp_path: Path) -> None:
    """Its stack is in a file, and its innermost line on the terminal."""
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == HANG_STATUS, done.stderr
    assert "hangs in step 3" in done.stderr and "rank 0 did not arrive: in step 3, data" in (
        done.stderr
    )
    assert "in read_rows, <string>:8" in done.stderr and "Traceback" not in done.stderr
    assert "in read_rows" in (tmp_path / "run/hangs/rank_0.txt").read_text()


RANK = """
from qfsdp.launch.watchdog import watched
from qfsdp.distributed.world import init_world

with watched(None):
    init_world()  # waits an hour for rank 0
"""


def test_a_rank_whose_agent_was_gone_before_it_looked_ends() -> None:
    """The agent hosts the store by which ranks find each other."""
    agent = subprocess.Popen(["true"])
    agent.wait()
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    rank = subprocess.run(
        [sys.executable, "-c", RANK],
        env=os.environ | torchrun | {AGENT: str(agent.pid)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert rank.returncode == -signal.SIGTERM, rank.stderr
    assert "rank 1: torchrun's agent is gone; this rank saves and ends" in rank.stderr
