"""What torchtune 0.6.1 needs from a torchao that no longer has it, in the installed version."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

from qfsdp.cli import torchtune as hook
from qfsdp.common.quiet import quiet_torchao

hook.install()
quiet_torchao()


def test_torchtune_imports_whole() -> None:
    for name in ("config", "data", "datasets", "models", "modules.peft", "training"):
        importlib.import_module(f"torchtune.{name}")


def test_nf4_is_torchaos_own() -> None:
    nf4 = importlib.import_module("torchao.dtypes.nf4tensor")
    weight = torch.linspace(-1, 1, 128 * 128).view(128, 128)
    back = nf4.to_nf4(weight).get_original_weight()
    assert (back - weight).abs().max() < 0.2
    if nf4.NF4Tensor.__module__ != nf4.__name__:  # it has moved: one class, not a copy
        now = importlib.import_module(nf4.NF4Tensor.__module__)
        assert now.NF4Tensor is nf4.NF4Tensor


@pytest.mark.parametrize(
    "path", [f"{m}.{name}" for m, names in hook._REMOVED.items() for name in names]
)
def test_a_removed_name_says_so(path: str) -> None:
    importlib.import_module("torchtune.training.quantization")
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if found.__module__ == hook.__name__:
        with pytest.raises(ImportError, match=f"{path}: this torchao does not have it"):
            found()


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_low_bit_optimizers_step(name: str) -> None:
    torch.compiler.set_stance("force_eager")
    try:
        weight = torch.nn.Parameter(torch.ones(64, 128))
        optimizer = getattr(importlib.import_module("torchao.optim"), name)([weight], lr=0.1)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert weight.max() < 0.9
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.long
def test_without_a_home() -> None:
    """A container whose user is not in /etc/passwd, without HOME."""
    script = (
        "import os, sys\nos.path.expanduser = lambda path: path\nos.environ.pop('HOME', None)\n"
    )
    script += "import torchtune._cli.tune\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    told = done.stderr.splitlines()
    assert done.returncode == 2 and told[-1].startswith("error: HOME: not set"), done.stderr
    assert "Traceback" not in done.stderr
