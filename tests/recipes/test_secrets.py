"""A run that reads secrets from the environment leaves none in its folder, resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.recipes.test_resume import run_recipe
from tests.tiny import write_tiny_run
from tests.toy_data import TOY_CONFIG

SECRETS = ("sk-of-the-environment", "key-of-the-logger", "token-in-a-word")
CONFIG = (
    TOY_CONFIG
    + """\
adapter: {{rank: 2, alpha: 4}}
metric_logger:
  _component_: tests.recipes.test_secrets.Logger
  folder: {folder}/run/logged
  api_key: key-of-the-logger
  project: ${{oc.env:QFSDP_SECRET}}
batch_size: 6
max_steps: 4
checkpoint: {{every_n_steps: 2}}
output_dir: {folder}/run
"""
)


class Logger:
    """Writes what a run gives to its logger, and checks that it has the secrets itself."""

    def __init__(self, folder: str, api_key: str, project: str, access_token: str) -> None:
        assert (project, api_key, access_token) == SECRETS
        self._file = Path(folder)

    def log_config(self, config: Any) -> None:
        self._write(config)

    def log(self, name: str, data: Any, step: int) -> None:
        self._write((name, data, step))

    def log_dict(self, payload: Any, step: int) -> None:
        self._write((payload, step))

    def close(self) -> None:
        self._write("closed")

    def _write(self, what: Any) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            print(what, file=file)


@pytest.mark.long
def test_no_file_of_a_run_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_tiny_run(tmp_path, CONFIG)
    monkeypatch.setenv("QFSDP_SECRET", SECRETS[0])
    run, words = tmp_path / "run", ["metric_logger.access_token=token-in-a-word", "report=true"]
    rest = [f"output_dir={tmp_path}/run/rest", f"resume={run}/checkpoints/step_00000002"]
    run_ranks(1, run_recipe, tmp_path, words, [*words, *rest])
    files = [path for path in run.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "metrics.jsonl", "report.html", "logged"} <= names
    assert any("checkpoints" in path.parts for path in files)
    has = [(p.name, s) for p in files for s in SECRETS if s.encode() in p.read_bytes()]
    assert not has
    for folder in (run, run / "rest"):
        assert "${oc.env:QFSDP_SECRET}" in (folder / "config.yaml").read_text()
    printed = "".join(capfd.readouterr())
    assert not any(secret in printed for secret in SECRETS)
