"""Systems and devices that are not here, by stand-ins: a run passes, or ends in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qfsdp.common import devices
from qfsdp.data.reading import Reading
from qfsdp.distributed.world import World, init_world
from qfsdp.launch.ranks import local_world_size
from qfsdp.planning.preflight import this_machine
from tests.data.test_tokenizer import CHAT, byte_level, write_folder
from tests.recipes.test_adapter_base import CONFIG
from tests.tiny import ROOT, run_recipe, write_tiny_model

WINDOWS = "import sys; sys.modules['fcntl'] = None; sys.argv = {}; import runpy; "


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `sched_getaffinity`, and a GPU without fp64 that has none of CUDA's functions."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    found = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: found)


@pytest.mark.parametrize("words", [["qfsdp", "ls"], ["qfsdp", "run", "recipes/merge"], ["demo"]])
def test_windows_is_one_line(words: list[str]) -> None:
    module = "examples.demo.run" if words == ["demo"] else "qfsdp.cli.command"
    code = WINDOWS.format(words) + f"runpy.run_module('{module}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and "WSL" in line


def test_a_mac_computes_on_its_cpu(macos: None) -> None:
    assert devices.accelerator() is None and local_world_size() == 1
    assert init_world().device == torch.device("cpu")
    assert devices.device_words() == "cpu: mps lacks fp64 and sharding, which runs need"
    assert this_machine(SimpleNamespace(device_memory=None), 1)[1] == "cpu"
    assert devices.cores() <= (os.cpu_count() or 1) and Reading().most_processes >= 1


@pytest.mark.long
def test_a_run_on_a_mac(macos: None, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("QFSDP_EAGER_KERNELS", "1")
    write_folder(write_tiny_model(tmp_path / "model"), byte_level())
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 8)
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    run_recipe("qdora_distributed", ["--config", f"{tmp_path}/config.yaml", "preflight=true"])
    assert (tmp_path / "run/adapter/adapter_config.json").is_file()
    assert "device    cpu: mps lacks" in capfd.readouterr().err


def test_a_device_without_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.full

    def full(size: Any, value: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert dtype != torch.float64
        return whole(size, value, dtype=dtype)

    def zeros(*_: Any, **__: Any) -> None:
        raise TypeError("this device has no float64")

    device = torch.device("xpu")
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch, "full", full)
    devices.sum_dtype.cache_clear()
    total = World(device).total(16_777_215.0)
    devices.sum_dtype.cache_clear()
    assert total.dtype == torch.float32 and total.item() == 16_777_215.0


def test_pytorch_for_cpus_beside_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.device_words() == "cpu: PyTorch sees no accelerator"
    (tmp_path / "version").write_text("NVRM version")
    monkeypatch.setattr(devices, "DRIVERS", {"NVIDIA": str(tmp_path / "version")})
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert "a driver of NVIDIA GPUs, but PyTorch" in devices.device_words()
    assert devices.device_words().endswith("whl/cu128")
