"""The newest transformers that pyproject.toml allows; other tests have that of constraints.txt."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tiny import ROOT

# 127 s here. `make test` has the same tests with the version of constraints.txt.
pytestmark = [pytest.mark.long, pytest.mark.slow]

# Logits, losses, gradients, packing, answers, FP8 folders and merges: 55 s of processor time.
FILES = [
    "tests/modules/test_hub_models.py",
    "tests/modules/test_hub_packing.py",
    "tests/checkpoint/test_hub_merge.py",
    "tests/checkpoint/test_fp8_folders.py",
    "tests/evaluation/test_hub_generation.py",
]
FOUND = """
import json, transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names
print(json.dumps([transformers.__version__, transformers.__file__, names.get("exaone")]))
"""


def run(words: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python in the checkout; packages in `folder` come before the installed ones."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "QFSDP_EAGER_KERNELS": "1"}
    env |= {} if folder is None else {"PYTHONPATH": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def newest(folder: Path) -> str:
    """Installs the newest allowed version into a folder, without what it needs; returns it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (allowed,) = project["optional-dependencies"]["transformers"]
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--no-compile", "--retries", "0", "--timeout", "20", "--target", str(folder)]
    if (done := run([*words, allowed])).returncode:
        reason = re.sub(r"https?://\S+", "", done.stderr.strip().splitlines()[-1])
        pytest.skip(f"pip installs no {allowed}: {reason}")
    (found,) = folder.glob("transformers-*.dist-info")
    return found.name.removeprefix("transformers-").removesuffix(".dist-info")


def test_models_of_the_newest_version_compute_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    version = newest(folder)
    if f"transformers=={version}\n" in (ROOT / "constraints.txt").read_text():
        pytest.skip(f"transformers {version} is the newest, and what all tests have")
    seen, file, exaone = json.loads(run(["-c", FOUND], folder).stdout)
    assert seen == version and Path(file).is_relative_to(folder)
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    done = run([*words, f"--basetemp={tmp_path / 'runs'}", *FILES], folder)
    assert done.returncode == 0, done.stdout[-4000:]
    print(version, done.stdout.strip().splitlines()[-1])
    # A model type that 5.24 has as another family's class, and 5.23 does not have.
    if exaone is not None:
        table = tmp_path / "figures.json"
        run(["benchmarks/any_model.py", "exaone", "--json", str(table)], folder)
        (row,) = json.loads(table.read_text()).values()
        assert row["status"] == "equal", row
