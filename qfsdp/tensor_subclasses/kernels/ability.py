"""Whether this process can compile: it tries once, and says why not in one line.

The compiler may be there and fail. The folder of compiled code may be full, read-only, a file, or
on a file system from which nothing may be executed.
"""

from __future__ import annotations

import ctypes
import functools
import getpass
import hashlib
import importlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from qfsdp.common.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
OF_TRITON = "TRITON_CACHE_DIR"
FREE = 1 << 16  # bytes that must fit in a folder of compiled code: about one kernel
CUT = "has a space, quote or backslash, where PyTorch cuts its commands; expected another folder"
SLOW_S, LIMIT_S = 5, 30  # the trial takes 0.6 to 1 s

# What inductor's code includes on any device. Its own headers come with PyTorch.
TRIAL = "#include <Python.h>\n#include <cmath>\n"
FLAGS = ["-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
if sys.platform == "linux":  # elsewhere OpenMP has many places
    TRIAL += "#include <omp.h>\n"
    FLAGS.append("-fopenmp")

# Inductor would say these to every user of a GPU. Products in fp32 are exact on purpose, and how it
# computes a softmax is its own choice.
for told in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
    warnings.filterwarnings("ignore", told, UserWarning)


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


def constant_when_compiled(function: F) -> F:
    """As `torch.compiler.assume_constant_result`, which imports Dynamo: 0.6 s of every start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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

    Builds and loads an empty library, in 0.6 to 1 s on a CPU core. It stays in the folder: the next
    start only loads it, in 1 ms.
    """
    folder = cache_folder()
    if isinstance(folder, OSError):
        return _of_folder(FOLDER, folder)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(compiler)
    if found is None:
        return f"no C++ compiler '{compiler}' found; expected g++, or CXX with another"
    if _is_cut(folder):
        return f"{FOLDER}: '{folder}' {CUT} (or compile_cache_dir)"
    if _is_cut(libraries := Path(torch.__file__).parent) and torch.__version__ < "2.14":
        return f"PyTorch: '{libraries}' {CUT}, or PyTorch 2.14"
    folders = {FOLDER: folder}
    if torch.cuda.is_available() and os.environ.get(OF_TRITON):
        folders[OF_TRITON] = Path(os.environ[OF_TRITON])
    for key, folder in folders.items():
        try:
            _try(found, folder)
        except OSError as error:
            return _of_folder(key, error)
        except subprocess.SubprocessError as error:
            return f"CXX: {compiler} cannot compile ({_said(error)}); expected a C++ compiler"
    return None


def _is_cut(path: Path) -> bool:
    """Whether a path is not one word of the text that inductor makes of its compiler's command."""
    try:
        return shlex.split(str(path)) != [str(path)]
    except ValueError:  # a quote that is not closed
        return True


failed_later = False  # a kernel could not be built, although the trial went well


def can_build_kernels() -> bool:
    """Whether the trial went well; if it did not, rank 0 says so, once."""
    reason = why_not()
    if reason is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        _say_uncompiled(reason)
    return reason is None


def stop_building_kernels(error: Exception) -> None:
    """Kernels run uncompiled from now on, with equal results."""
    global failed_later
    failed_later = True
    _say_uncompiled(failed_build(error))


@functools.cache
def _say_uncompiled(reason: str) -> None:
    logging.getLogger("qfsdp").warning("4-bit kernels run uncompiled and slower: %s", reason)


def _try(compiler: str, folder: Path) -> None:
    """Writes to the folder, and loads a library in it, which `compiler` builds if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as free:
        free.write(bytes(FREE))
    built = os.stat(compiler)  # a new compiler is tried again, and so is another Python
    tried = f"{compiler} {built.st_size} {built.st_mtime_ns} {sys.version} {TRIAL}"
    library = folder / f"qfsdp_trial_{hashlib.sha256(tried.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # other ranks may build it too
            made = Path(own) / library.name
            _build(compiler, made)
            os.replace(made, library)
    ctypes.CDLL(str(library))


def _build(compiler: str, library: Path) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(TRIAL)
    process = subprocess.Popen(
        [compiler, *FLAGS, str(source), "-o", str(library)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        try:
            output, _ = process.communicate(timeout=SLOW_S)
        except subprocess.TimeoutExpired:
            log = logging.getLogger("qfsdp")
            log.warning("waiting for %s, up to %d s", compiler, LIMIT_S)
            output, _ = process.communicate(timeout=LIMIT_S - SLOW_S)
    finally:
        if process.poll() is None:  # the compiler proper is a child of it, and has the pipe as well
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0 or not library.exists():
        raise subprocess.CalledProcessError(process.returncode, compiler, output)


def failed_build(error: BaseException) -> str:
    """What a message says of code that could not be built after the trial."""
    return (
        f"code cannot be built ({_said(_cause(error))}); expected a working C++ compiler (CXX) and "
        f"space in {os.environ.get(FOLDER, _default_folder())} ({FOLDER}, compile_cache_dir)"
    )


def is_failed_build(error: BaseException) -> bool:
    """Whether `torch.compile` could not build code for a reason of the machine; false if memory is
    out, and for mistakes in inductor."""
    cause = _cause(error)
    if type(cause).__name__ in ("CppCompileError", "InvalidCxxCompiler", "SubprocException"):
        return True
    return cause is not error and isinstance(cause, OSError | subprocess.SubprocessError)


def _cause(error: BaseException) -> BaseException:
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return error


def _of_folder(key: str, error: OSError) -> str:
    given = os.environ.get(key, f"not set, {_default_folder()}")
    return (
        f"{key}: {given}: {_said(error)}; expected a folder where programs can be written "
        "and run (or compile_cache_dir)"
    )


def _said(error: BaseException) -> str:
    """What is wrong, of a failed build: the compiler's own line, or the system's reason."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it takes over {LIMIT_S} s"
    text = getattr(error, "output", None)  # of the compiler
    lines = [line.strip() for line in str(text or error).splitlines()]
    said = [line for line in lines if "rror:" in line or "No space" in line]
    return (said or lines or ["it says nothing"])[0][:200]


def check_compile(compile: bool, path: str | None) -> None:
    """Checks the keys `compile` and `compile_cache_dir`. Raises UserError: the folder cannot be
    made; or layers are to be compiled, and a trial fails."""
    use_cache_dir(path, report=False)
    if compile and not has_compiler():
        raise UserError(f"compile: true, but {why_not()}; or compile=false")


def use_cache_dir(path: str | None, report: bool) -> None:
    """Sets the folder of compiled code, which the next start reuses.

    Args:
        path: None: PyTorch's default, `TORCHINDUCTOR_CACHE_DIR` or a folder of the user in /tmp.
        report: print the folder.

    Raises:
        UserError: the folder cannot be made.
    """
    if path is not None:
        folder = Path(path).expanduser().absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"compile_cache_dir: '{path}' cannot be made: {error}") from None
        os.environ[FOLDER] = str(folder)
    if report:
        print(f"compiled code: {cache_folder()}", flush=True)
