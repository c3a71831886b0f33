"""Scripts of docs/ and benchmarks/ print their help and refuse words that they do not know, before
they write or measure anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import ROOT

SCRIPTS = [
    file
    for folder in ("docs", "benchmarks")
    for file in sorted((ROOT / folder).glob("*.py"))
    if "\nif __name__ ==" in file.read_text()
]
# They are started by other scripts, and take other words as their input.
WORKERS = {"load_base_torchtune.py", "train_step_worker.py"}


def test_every_script_reads_its_words() -> None:
    silent = {file.name for file in SCRIPTS if not re.search(r"\.parse_\w+\(", file.read_text())}
    assert len(SCRIPTS) > 60 and silent == WORKERS


@pytest.mark.parametrize(
    "file", [file for file in SCRIPTS if file.parent.name == "docs"], ids=lambda file: file.stem
)
def test_a_script_of_docs_refuses_unknown_words(file: Path) -> None:
    for word, status, says in (("--help", 0, "usage: "), ("--no-such", 2, "error: ")):
        done = subprocess.run(
            [sys.executable, file, word], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == status and says in done.stdout + done.stderr


def test_estimates_of_no_config() -> None:
    words = [sys.executable, "docs/estimates.py", "llama3_8b_qdor"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "error: llama3_8b_qdor: no config that names" in done.stderr
