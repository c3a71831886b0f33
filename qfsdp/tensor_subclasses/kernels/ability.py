"""Whether this process can compile: it tries once, and says why not in one line.

A compiler that is found may not work, and neither may the folder of compiled code: it may be a
file, full, read-only, or of a file system from which nothing may be executed.
"""

from __future__ import annotations

import functools
import getpass
import importlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def import_dynamo() -> None:
    """Imports `torch._dynamo`, also where the folder of compiled code cannot be made: its import
    makes the folder, and would raise."""
    if "torch._dynamo" in sys.modules:
        return
    given = os.environ.get(FOLDER)
    if isinstance(cache_folder(), OSError):
        os.environ[FOLDER] = os.sep  # exists; nothing is written there, as nothing is compiled
    try:
        importlib.import_module("torch._dynamo")
    finally:
        os.environ.pop(FOLDER, None)
        if given is not None:
            os.environ[FOLDER] = given


def cache_folder() -> Path | OSError:
    """The folder of compiled code, which is made; or why it cannot be made."""
    try:
        given = os.environ.get(FOLDER)
        folder = Path(_default_folder() if given is None else given).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError as error:
        return error


def _default_folder() -> str:
    """The folder that PyTorch takes; its own function is in a package that imports Dynamo."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


def has_compiler() -> bool:
    """Whether inductor can build code on this machine. It needs a C++ compiler on GPUs as well,
    because Triton builds its launcher with it."""
    return why_not() is None


@functools.cache
def why_not() -> str | None:
    """Why nothing can be compiled, and what to set; None if it can.

    Builds and loads a library of one function. It takes 0.4 s if the folder has it, otherwise 3 s;
    most of it is the search for the processor's vector instructions, which kernels need as well.
    """
    import_dynamo()
    folder = cache_folder()
    if isinstance(folder, OSError):
        return _of_folder(folder)
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except Exception:  # InvalidCxxCompiler, InductorError, or what starting a program may raise
        if "CXX" not in os.environ:
            return "no C++ compiler found; expected g++, or CXX with another"
        return f"CXX: '{os.environ['CXX']}' is no C++ compiler that works; expected one, as g++"
    try:
        # The compiler's own file is part of the source: a new compiler is tried again.
        found = os.stat(shutil.which(compiler) or compiler)
        version = f"// {compiler} {found.st_size} {found.st_mtime_ns}\n"
        CppCodeCache.load(version + 'extern "C" void kernel() {}\n')
    except OSError as error:
        return _of_folder(error)
    except Exception as error:  # of inductor's builder; nothing else runs here
        return f"CXX: {compiler} cannot compile ({reason_of(error)}); expected a C++ compiler"
    return None


def failed_build(error: BaseException) -> str:
    """What a message says of code that could not be built after the trial."""
    return (
        f"code cannot be built ({reason_of(error)}); expected a working C++ compiler (CXX) and "
        f"space in {os.environ.get(FOLDER)} ({FOLDER}, compile_cache_dir)"
    )


def _of_folder(error: OSError) -> str:
    given = os.environ.get(FOLDER, "not set, a folder in that of temporary files")
    return (
        f"{FOLDER}: {given}: {reason_of(error)}; expected a folder where programs can be written "
        "and run (or compile_cache_dir)"
    )


def reason_of(error: BaseException) -> str:
    """What is wrong, of a failed build: the compiler's own line, or the system's reason."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = getattr(error, "output", None)  # of the compiler
    lines = [line.strip() for line in str(error if text is None else text).splitlines()]
    said = [line for line in lines if "error:" in line or "No space" in line]
    return (said or lines or ["it says nothing"])[0][:200]


def is_failed_build(error: BaseException) -> bool:
    """Whether `torch.compile` could not build code; false if memory is out."""
    from torch._dynamo.exc import BackendCompilerFailed

    if isinstance(error, BackendCompilerFailed):
        return not isinstance(error.inner_exception, MemoryError | torch.OutOfMemoryError)
    return type(error).__name__ == "CppCompileError"
