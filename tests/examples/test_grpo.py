"""The loop of one's own in examples/grpo runs as typed, from the first draw to the adapter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.tiny import ROOT, write_tiny_model_with_tokenizer


@pytest.mark.long
def test_one_update(smollm2_dir: Path, tmp_path: Path) -> None:
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir)
    words = [f"model.path={model}", f"output_dir={tmp_path / 'run'}", "adapter.rank=4"]
    words += ["updates=1", "problems=2", "k=2", "heldout=3", "sampling.max_new_tokens=2"]
    command = [sys.executable, "-m", "qfsdp.cli.command", "run", "examples/grpo/train.py"]
    command += ["--config", "examples/grpo/smollm2_135m.yaml", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
