"""What torchtune 0.6.1 needs from a torchao that no longer has it, in the installed version."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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
    script = "import os, pwd\npwd.getpwuid = {}.__getitem__\nos.environ.pop('HOME', None)\n"
    script += "import torchtune._cli.tune\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_help_that_nobody_reads_to_its_end(tmp_path: Path) -> None:
    """`tune --help | head`"""
    (tmp_path / "tune").write_text("from torchtune._cli.tune import main\nmain()\n")
    read, write = os.pipe()
    os.close(read)
    typed = [sys.executable, tmp_path / "tune", "--help"]
    done = subprocess.run(typed, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""


# What pip writes for torchtune, and at its end what it has imported.
SCRIPT = """
import atexit, importlib.util, sys
def imported():
    there = sorted({"torch", "torchtune"} & {*sys.modules})
    print("imported", there, importlib.util.find_spec("torchtune").submodule_search_locations)
atexit.register(imported)
from torchtune._cli.tune import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("recipes/qdora_distributed --config nofile.yaml", "--config nofile.yaml: no such file"),
        ("recipes/lora", "recipes/lora: no such recipe; did you mean 'recipes/qdora_distributed'?"),
    ],
)
def test_a_mistake_is_told_before_torch_is_imported(tmp_path: Path, words: str, told: str) -> None:
    """`tune run recipes/NAME` costs what `qfsdp run` does, and leaves no stand-in behind."""
    (tmp_path / "tune").write_text(SCRIPT)
    typed = [sys.executable, tmp_path / "tune", "run", *words.split()]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {told}"), done.stderr
    found = importlib.util.find_spec("torchtune")
    assert found is not None
    assert done.stdout == f"imported [] {found.submodule_search_locations}\n"


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("run recipes/x --config y", True),
        ("run ./recipes/x.py", True),
        ("run --nproc_per_node 2 recipes/x --config y", True),
        ("run --nnodes=2 --node_rank 1 --standalone recipes/x", True),
        ("run lora_finetune_distributed --config recipes/x.yaml", False),
        ("run --nproc_per_node 2 lora_finetune_distributed --config recipes/x.yaml", False),
        ("run --standalone full_finetune_distributed --config recipes/x.yaml", False),
        ("run my/recipes/x.py", False),
        ("run", False),
        ("ls", False),
        ("cp recipes/x y.py", False),
        ("download recipes/x", False),
        ("", False),
    ],
)
def test_which_command_lines_are_ours_for_sure(words: str, ours: bool) -> None:
    assert hook._runs_ours(words.split()) is ours
