"""Compilers and folders that do not work cost one line, and kernels run uncompiled."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from qfsdp.common.errors import UserError
from qfsdp.planning.oom import Run, explain_out_of_memory
from qfsdp.tensor_subclasses.kernels import ability, compiled
from tests.disk_limits import largest_file
from tests.tiny import needs_compiler


@pytest.fixture(autouse=True)
def own_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test tries again, in a folder of its own."""
    monkeypatch.setenv(ability.FOLDER, str(tmp_path / "compiled"))
    for cached in (caches := (ability.why_not, ability._say_uncompiled)):
        cached.cache_clear()
    monkeypatch.setattr(ability, "failed_later", False)
    yield
    for cached in caches:
        cached.cache_clear()


def script(tmp_path: Path, text: str) -> str:
    file = tmp_path / "g++"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 1", "exit status 1"),
        ("exit 0", "exit status 0"),  # it wrote nothing
        ("kill -9 $$", "SIGKILL"),
        ("echo 'a.cpp:1:10: fatal error: Python.h: No such file'; exit 1", "fatal error: Python.h"),
        ("sleep 1000 & sleep 1000", "over 1 s"),
    ],
)
def test_a_compiler_that_fails(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, text))
    monkeypatch.setattr(ability, "SLOW_S", 0.5)
    monkeypatch.setattr(ability, "LIMIT_S", 1)
    with pytest.raises(UserError, match=f"^compile: true, but CXX: .*{reason}.*or compile=false$"):
        compiled.check_compile(True, None)
    compiled.check_compile(False, None)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g+++")
    with pytest.raises(UserError, match=r"compile: true, but no C\+\+ compiler 'g\+\+\+' found"):
        compiled.check_compile(True, None)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_a_folder_that_cannot_be_made(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(ability.FOLDER, str(tmp_path / place))
    with pytest.raises(UserError, match=f"^compile: true, but {ability.FOLDER}: .*{place}: "):
        compiled.check_compile(True, None)
    with pytest.raises(UserError, match=f"^compile_cache_dir: '.*{place}' cannot be made"):
        compiled.check_compile(False, str(tmp_path / place))


@needs_compiler
@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "a\\b"])
@pytest.mark.parametrize("place", ["folder", "PyTorch"])
def test_a_path_that_inductor_cuts(
    tmp_path: Path, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command of the compiler is a text without quotes. The build failed in the first step."""
    path = tmp_path / name
    if place == "folder":
        monkeypatch.setenv(ability.FOLDER, str(path))
    else:
        monkeypatch.setattr("torch.__file__", str(path / "__init__.py"))
        monkeypatch.setattr("torch.__version__", TorchVersion("2.13.0"))
    assert f"'{path}' has a space, quote or backslash" in str(ability.why_not())
    monkeypatch.setattr("torch.__version__", TorchVersion("2.14.0"))
    ability.why_not.cache_clear()
    assert (ability.why_not() is None) == (place == "PyTorch")


def test_a_full_folder() -> None:
    with largest_file(1000):
        assert "File too large; expected a folder" in str(ability.why_not())


def test_tritons_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(ability.OF_TRITON, str(tmp_path / "file"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ability, "_try", lambda compiler, folder: folder.mkdir(exist_ok=True))
    assert str(ability.why_not()).startswith(f"{ability.OF_TRITON}: {tmp_path}/file: File exists")


@needs_compiler
def test_the_trial_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ability.why_not() is None
    monkeypatch.setattr(subprocess, "Popen", None)
    ability.why_not.cache_clear()
    assert ability.why_not() is None
    text = tmp_path / "text.so"
    text.write_text("no library")  # what is on a file system without execution cannot be loaded too
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda library: load(str(text)))
    ability.why_not.cache_clear()
    assert f"{ability.FOLDER}: {tmp_path}/compiled: " in str(ability.why_not())


def add_twice(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y


def failing(error: Exception) -> Any:
    def compile_fx(*args: Any, **options: Any) -> Any:
        raise error

    return compile_fx


@needs_compiler
def test_a_kernel_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", full)
    kernel, x = compiled.compiled(add_twice), torch.randn(200, 200)
    with caplog.at_level(logging.WARNING, "qfsdp"):
        for _ in range(2):
            assert torch.equal(kernel(x, x), add_twice(x, x))
    (line,) = caplog.messages
    assert "uncompiled and slower: code cannot be built (No space left on device); expect" in line
    assert not compiled.can_compile()


@needs_compiler
def test_mistakes_of_the_compiler_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", failing(ValueError("a bug")))
    with pytest.raises(Exception, match="a bug"):
        compiled.compiled(add_twice)(torch.randn(200, 200), torch.randn(200, 200))


def test_layers_that_cannot_be_built_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import CppCompileError

    def main(cfg: Any, run: Run) -> None:
        def backend(graph: Any, examples: Any) -> Any:
            raise CppCompileError(["g++"], "a.cpp:1: fatal error: writing: No space left on device")

        torch.compile(add_twice, backend=backend)(torch.ones(2), torch.ones(2))

    class Config:
        compile = True

    with pytest.raises(UserError, match="^code cannot be built .*No space.*, or compile=false$"):
        explain_out_of_memory(main)(Config())


@pytest.mark.long
def test_dynamo_is_imported_without_a_folder() -> None:
    """As where /tmp is full or read-only: only a try in a new process shows it."""
    code = (
        "from qfsdp.training.optimizer import check_optimizer\n"
        "from qfsdp.config.component import Component\n"
        "check_optimizer(Component('torch.optim.SGD', {'lr': 0.1}), None)\n"
        "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    environ = os.environ | {ability.FOLDER: "/proc/none"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "/proc/none\n"), done.stderr


def test_a_user_does_not_read_what_inductor_advises() -> None:
    """Its own texts (the second is torch 2.11's), in a process without pytest's filters."""
    inductor = Path(torch.__file__).parent / "_inductor"
    advice = "TensorFloat32 tensor cores for float32 matrix multiplication available"
    assert advice in (inductor / "compile_fx.py").read_text()
    lines = ["import warnings", "import qfsdp.tensor_subclasses.kernels.compiled"]
    for text in (advice, "\nOnline softmax is disabled on the fly", "else"):
        lines.append(f"warnings.warn({text!r})")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("Warning") == 1 and "UserWarning: else" in done.stderr
