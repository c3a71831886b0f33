"""Metric loggers of the guide, each run offline: config and curves are read back from its files.

Loggers whose package is not installed are left out; `pip install wandb mlflow comet_ml`.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.config.load import load_config
from qfsdp.training.metric_logger import SafeLogger, build_logger, check_logger
from tests.tiny import ROOT, load_recipe
from tests.toy_data import TOY_CONFIG
from tests.waiting import LIMIT_S

LOSSES = {1: 2.5, 2: 1.25, 3: 0.625}
SCRIPT = """
import sys
from qfsdp.config.load import load_config
from qfsdp.training.metric_logger import build_logger, check_logger
from tests.tiny import load_recipe
cfg = load_config(load_recipe().Config, sys.argv[2:])
check_logger(cfg.metric_logger)
logger = build_logger(cfg.metric_logger, 0, cfg)
for step in map(int, sys.argv[1].split(",")):
    logger.log_dict({"loss": 5 / 2**step, "validation/a/loss": 1.0}, step=step)
logger.close()
"""


def example(name: str) -> str:
    """The YAML of a section of the guide."""
    guide = (ROOT / "docs/guide/loggers.md").read_text()
    section = re.search(rf"^## {name}\n.*?```yaml\n(.*?)```", guide, re.MULTILINE | re.DOTALL)
    assert section is not None
    return section[1]


def log_run(folder: Path, name: str, *words: str, steps: str = "1,2,3", more: str = "") -> None:
    """Logs steps with the guide's logger and `more` arguments, in a process of its own."""
    config = folder / "config.yaml"
    text = TOY_CONFIG.format(folder=folder) + f"output_dir: {folder}/run\n" + example(name) + more
    config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, steps, "--config", str(config), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "warning: metric_logger" not in done.stderr, done.stderr


@pytest.mark.long
def test_wandb(tmp_path: Path) -> None:
    """A resumed run continues the run, whatever changed in its config."""
    pytest.importorskip("wandb")
    log_run(tmp_path, "Weights & Biases", steps="1,2")
    log_run(tmp_path, "Weights & Biases", "resume=auto", "max_steps=3", steps="3")
    runs = sorted((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2 and runs[0].name == runs[1].name, "the same id"
    config: dict[str, Any] = {}
    losses: dict[int, float] = {}
    for record in [record for file in runs for record in wandb_records(file)]:
        for update in [*record.config.update, *record.run.config.update]:
            config[update.key] = json.loads(update.value_json)
        row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "loss" in row:
            losses[int(row["global_step"])] = float(row["loss"])
    assert losses == LOSSES
    assert config["adapter"]["rank"] == 16 and config["optimizer"]["lr"] == 1e-3
    assert config["max_steps"] == 3 and config["output_dir"] == f"{tmp_path}/run"


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of W&B's file, which has LevelDB's log format after 7 bytes: blocks of 32 KiB
    with pieces of records; a piece is checksum (4 bytes), length (2), type (1) and data."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, begun = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(begun)
            yield record
            begun = b""


@pytest.mark.long
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    log_run(tmp_path, "MLflow", steps="1,2")
    log_run(tmp_path, "MLflow", "resume=auto", steps="3")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("qfsdp")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == LOSSES
    assert run.data.params["adapter.rank"] == "16" and run.data.params["optimizer.lr"] == "0.001"
    assert run.info.status == "FINISHED"


@pytest.mark.long
def test_comet(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    log_run(tmp_path, "Comet", more="  api_key: secret\n")
    (archive,) = (tmp_path / "run/comet").glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        lines = files.read("messages.json").decode().splitlines()
    assert "secret" not in "".join(lines)
    messages = [json.loads(line)["payload"] for line in lines]
    metrics = [message["metric"] for message in messages if "metric" in message]
    losses = {m["step"]: m["metricValue"] for m in metrics if m["metricName"] == "loss"}
    assert losses == LOSSES
    told = [message["param"] for message in messages if message.get("param")]
    params = {param["paramName"]: param["paramValue"] for param in told}
    assert int(params["adapter|rank"]) == 16


@pytest.mark.long
def test_several(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run(tmp_path, "Several at once")
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    found = {event.step: event.tensor_proto.float_val[0] for event in events.Tensors("loss")}
    assert found == LOSSES
    (disk,) = (tmp_path / "run").glob("log_*.txt")
    assert "Step 3 | loss:0.625" in disk.read_text()


# ---- without a service -----------------------------------------------------------------------


class Notes:
    """A logger that keeps what it is told, in `told`."""

    told: list[Any]

    def __init__(self, how: str = "") -> None:
        self.how = how
        Notes.told = [*getattr(Notes, "told", []), "built"] if how != "first" else ["built"]

    def log_config(self, config: Any) -> None:
        if self.how == "refuses":
            raise ValueError("a value has changed")
        Notes.told.append(config)

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        Notes.told.append((self.how, step, dict(payload)))
        if self.how == "ends":
            raise SystemExit(1)
        payload.clear()  # of this logger, not of the next

    def close(self) -> None:
        Notes.told.append(f"closed {self.how}")


def load(tmp_path: Path, loggers: str, *words: str) -> Any:
    file = tmp_path / "config.yaml"
    text = TOY_CONFIG.format(folder=tmp_path) + f"output_dir: {tmp_path}/run\n" + loggers
    file.write_text(text)
    return load_config(load_recipe().Config, ["--config", str(file), *words])


NOTES = f"{{_component_: {__name__}.Notes, how: %s}}"
BOTH = f"metric_logger: [{NOTES % 'first'}, {NOTES % 'refuses'}]\n"


def test_loggers_get_the_config_and_one_may_refuse_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = load(tmp_path, BOTH, "seed=7")
    check_logger(cfg.metric_logger)
    assert build_logger(cfg.metric_logger, 1, cfg) is None
    logger = build_logger(cfg.metric_logger, 0, cfg)
    assert logger is not None
    logger.log_dict({"loss": 1.5}, step=1)
    logger.close()
    built, again, config, *rest = Notes.told
    assert built == again == "built"
    assert config.seed == 7 and config.adapter.rank == 16 and config.output_dir == f"{tmp_path}/run"
    assert rest == [
        ("first", 1, {"loss": 1.5}),
        ("refuses", 1, {"loss": 1.5}),
        "closed refuses",
        "closed first",
    ]
    warning = "warning: metric_logger[1]: Notes did not take the config (ValueError: a value has"
    assert capsys.readouterr().err.startswith(warning)


@pytest.mark.parametrize(
    ("loggers", "words", "message"),
    [
        (BOTH, ["metric_logger.how=x"], "'metric_logger' is a list; give it as a whole"),
        (BOTH, ["metric_logger.0.how=x"], "'metric_logger' is a list; give it as a whole"),
        (BOTH, ["~metric_logger.0"], "has no such key to remove"),
        (BOTH, ["metric_logger=[1]"], "metric_logger[0]: 1 is not valid; expected a mapping with"),
        (BOTH, ["metric_logger=7"], "metric_logger: 7 is not valid; expected a mapping with"),
        (BOTH, [f"metric_logger=[{NOTES % 'a, hwo: b'}]"], "metric_logger[0].hwo: '"),
        (BOTH, ["metric_logger=[torch.optim.SGD]"], "metric_logger[0]._component_: 'torch.opt"),
    ],
)
def test_mistakes_in_a_list_are_one_line(
    tmp_path: Path, loggers: str, words: list[str], message: str
) -> None:
    with pytest.raises(UserError) as error:
        check_logger(load(tmp_path, loggers, *words).metric_logger)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_list_on_the_command_line(tmp_path: Path) -> None:
    cfg = load(tmp_path, BOTH, f"metric_logger=[{__name__}.Notes]")
    assert cfg.metric_logger == [Component(f"{__name__}.Notes")]
    check_logger(cfg.metric_logger)
    assert load(tmp_path, BOTH, "metric_logger=null").metric_logger is None


def test_a_logger_that_cannot_write_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtune's DiskLogger has a destructor that fails if its constructor has failed."""
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)  # would print a traceback
    (tmp_path / "file").write_text("")
    path = "torchtune.training.metric_logging.DiskLogger"
    SafeLogger(Component(path, {"log_dir": str(tmp_path / "file" / "logs")}, "metric_logger"))
    gc.collect()
    said = capsys.readouterr().err
    assert said.count("warning: metric_logger: DiskLogger failed (NotADirectoryError: ") == 1
    assert not failed and "Traceback" not in said


def test_a_logger_that_ends_the_process_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = SafeLogger(Component(f"{__name__}.Notes", {"how": "ends"}))
    for step in (1, 2):
        logger.log_dict({"loss": 1.0}, step=step)
    assert Notes.told[-1] == ("ends", 1, {"loss": 1.0})
    assert "Notes failed (SystemExit: 1); the run goes on" in capsys.readouterr().err


def test_a_folder_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in {"~": tmp_path, "~/a": tmp_path / "a", "a~": "a~"}.items():
        SafeLogger(Component(f"{__name__}.Notes", {"how": given})).log_dict({"loss": 1.0}, step=1)
        assert Notes.told[-1][0] == str(expected)
