"""The log of a run on a full disk, with a failing metric logger, and after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.training import metrics
from qfsdp.training.metric_logger import build_logger
from qfsdp.training.metrics import MetricsFile, RunLog, write_run_files
from tests.disk_limits import largest_file
from tests.tiny import ROOT
from tests.waiting import LIMIT_S, without_waiting

METRICS = {"loss": 1.5, "grad_norm": 0.25}


def steps(file: Path) -> list[int]:
    return [json.loads(line, parse_constant=pytest.fail)["step"] for line in open(file)]


class FailingLogger:
    """Fails as `how` says; `closed` counts the calls of its destructor."""

    closed = 0

    def __init__(self, how: str) -> None:
        if how == "build":
            raise OSError(28, "No space left on device")
        if how == "mistake":
            raise ValueError("no such project\nsecond line")
        self._how, self._go = how, threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        self._go.wait()
        if self._how == "thread":
            raise ConnectionError("connection reset")

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        if self._how == "log":
            self._go.set()
            raise RuntimeError("the service is gone")

    def close(self) -> None:
        self._go.set()
        self._thread.join()
        if self._how == "close":
            raise OSError(28, "No space left on device")

    def __del__(self) -> None:
        FailingLogger.closed += 1


def test_a_full_disk_costs_one_warning_and_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path, None, 0, 9)
    log.log(1, METRICS)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with largest_file(size + 10):  # room for a part of the next line
        for step in (2, 3, 4):
            log.log(step, METRICS)
        assert steps(tmp_path / "metrics.jsonl") == [1]
    log.log(5, METRICS)
    log.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 2
    assert "File too large; training goes on" in warnings[0]
    assert "written again; no lines are lost" in warnings[1]


def test_lines_that_never_found_space_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "KEPT_LINES", 3)
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    with largest_file(10):
        for step in range(1, 8):
            file.add(step, METRICS)
        file.close()
    assert "lacks 7 lines" in capsys.readouterr().err
    file.add(8, METRICS)
    assert steps(tmp_path / "metrics.jsonl") == [6, 7, 8]
    assert "written again; 5 lines are lost" in capsys.readouterr().err


def test_the_folder_is_removed_during_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    log = RunLog(tmp_path / "run", None, 0, 9)
    log.log(1, METRICS)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run").rmdir()
    log.log(2, METRICS)
    log.close()
    assert "metrics.jsonl' cannot be written: No such file or directory" in capsys.readouterr().err


def test_metrics_that_are_no_numbers(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.add(1, {"loss": float("nan"), "validation/a/perplexity": float("inf"), "lr": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "loss": null, "validation/a/perplexity": null, "lr": 0.5}\n'


@pytest.mark.parametrize(
    "damage",
    [
        b'{"step": 3, "loss": 1.5, "more": {"a": 1}',  # cut, but it ends with a brace
        b"\xff\xfe\x00\x80}",
        b"[" * 100_000 + b"}",
        b"17",
        b'{"loss": 1}',
        b'{"step": "3"}',
        b"",
    ],
)
def test_damaged_lines_are_removed(tmp_path: Path, damage: bytes) -> None:
    whole = [f'{{"step": {step}, "loss": 1.5}}\n'.encode() for step in (1, 2, 3, 4)]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(whole[:2]) + damage + b"\n" + whole[2] + whole[3] + damage)
    MetricsFile(path, 3).add(4, METRICS)
    assert steps(path) == [1, 2, 3, 4]
    assert path.read_bytes().startswith(b"".join(whole[:3]))


def test_a_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    MetricsFile(path, 2).add(3, METRICS)
    assert steps(path) == [1, 2, 3]


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl' cannot be written: Is a directory"):
        RunLog(tmp_path, None, 0, 9)


@pytest.mark.parametrize("how", ["build", "log", "thread", "close"])
def test_a_failing_logger_costs_one_warning(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hook, freed = threading.excepthook, FailingLogger.closed
    logger = build_logger(Component(f"{__name__}.FailingLogger", {"how": how}), rank=0)
    log = RunLog(tmp_path, logger, 0, 9)
    for step in (1, 2, 3):
        log.log(step, METRICS)
    log.close()
    err = without_waiting(capfd.readouterr().err)
    assert err.count("warning: metric_logger: FailingLogger failed (") == 1
    assert err.count("\n") == 4, err  # three steps
    assert threading.excepthook is hook
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    del log
    assert FailingLogger.closed == freed, "its destructor would fail again"


def test_a_logger_that_cannot_be_built(tmp_path: Path) -> None:
    logger = Component(f"{__name__}.FailingLogger", {"how": "mistake"})
    with pytest.raises(UserError, match=r"FailingLogger' failed: no such project; expected"):
        build_logger(logger, rank=0)


@pytest.mark.long
def test_tensorboard_on_a_full_disk(tmp_path: Path) -> None:
    """In a process of its own: what is printed at its end counts as well."""
    folder = str(tmp_path)
    script = f"""
import resource
from pathlib import Path
from qfsdp.config.component import Component
from qfsdp.training.metric_logger import build_logger
from qfsdp.training.metrics import RunLog
path = "torchtune.training.metric_logging.TensorBoardLogger"
logger = build_logger(Component(path, {{"log_dir": {folder + "/tb"!r}}}), 0)
log = RunLog(Path({folder!r}), logger, 0, 9)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
for step in range(1, 30):
    log.log_apart(step, {{"loss": 1.5}}, "")
log.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stderr.count("TensorBoardLogger failed (OSError: File too large)") == 1
    assert done.stderr.count("warning") == 3, done.stderr  # two of the file


def test_run_files_are_whole(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("of the last run\n")
    with largest_file(4), pytest.raises(UserError, match="cannot be written: File too large"):
        write_run_files(tmp_path, {"seed": 1}, __file__)
    assert (tmp_path / "config.yaml").read_text() == "of the last run\n"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
