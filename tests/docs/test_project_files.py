"""Files that strangers and services read: issue forms, the workflow, the citation, the caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

import qfsdp
from examples.demo import cache_dir
from qfsdp.config.load import load_config
from tests.tiny import ROOT, load_recipe


def test_forms_ask_for_the_doctor() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    for form in (file for file in forms if file.stem != "config"):
        parsed = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= {*parsed}
        (doctor,) = (part for part in parsed["body"] if part["id"] == "doctor")
        assert "qfsdp doctor output=doctor.json" in doctor["attributes"]["description"]


def test_the_workflow_runs_what_must_pass() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert [step.get("run") for step in workflow["jobs"]["run"]["steps"]][-1] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_citation_has_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == qfsdp.__version__


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the demo and in the configs that use its model; QFSDP_CACHE is stronger."""
    monkeypatch.setenv("QFSDP_CACHE", "")
    monkeypatch.delenv("QFSDP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = ["--config", str(ROOT / "configs/smollm2_135m_qlora.yaml")]
    for folder in (tmp_path / "qfsdp", tmp_path / "own"):
        assert cache_dir() == folder
        cfg = load_config(load_recipe().Config, config)
        assert cfg.model.path == f"{folder}/SmolLM2-135M-Instruct"
        monkeypatch.setenv("QFSDP_CACHE", str(tmp_path / "own"))
