"""The decorator `compiled`: `torch.compile` for kernels, if the machine has a C++ compiler."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

from qfsdp.cli.errors import UserError
from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.tensor_subclasses.kernels.dispatch import Kernel

DYNAMIC_DEVICES = ("cpu",)  # devices for which `static_on_gpus` changes nothing

P = ParamSpec("P")
R = TypeVar("R")

SMALLEST_COMPILED = 1 << 14  # elements of the first tensor, unless a kernel sets `smallest`

# For kernels over rows of bytes, on GPUs. By default inductor tiles them as blocks by bytes of a
# block, with masks, and checks the index of every lookup: 37 to 55 instructions for a weight of NF4
# in its code for an H100, 14 with these options (torch 2.11).
FLAT_ON_GPUS: dict[str, Any] = {"triton.max_tiles": 1, "assert_indirect_indexing": False}
# GPUs round products and divisions as CPUs do: no fused multiply-adds.
ROUNDED_AS_ON_CPUS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
}


@functools.cache
def has_compiler() -> bool:
    """Whether inductor can build code on this machine. It needs a C++ compiler on GPUs as well,
    because Triton builds its launcher with it."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, InductorError, RuntimeError):
        return False
    return True


def can_compile() -> bool:
    """Whether kernels are compiled: the machine has a C++ compiler, and `QFSDP_EAGER_KERNELS=1` is
    not set. In an estimate for a GPU this machine's compiler does not matter."""
    if os.environ.get("QFSDP_EAGER_KERNELS") == "1":
        return False
    if dry_run.current is not None and dry_run.current.target != "cpu":
        return True
    if not has_compiler():
        _warn_of_no_compiler()
    return has_compiler()


@functools.cache
def _warn_of_no_compiler() -> None:
    logging.getLogger("qfsdp").warning(
        "no C++ compiler found: 4-bit kernels run uncompiled and slower (install g++)"
    )


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
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    if report:
        from torch._inductor.runtime.runtime_utils import cache_dir

        print(f"compiled code: {cache_dir()}", flush=True)


def compiled(
    fn: Callable[P, R],
    options: dict[str, Any] | None = None,
    smallest: int = SMALLEST_COMPILED,
    static_on_gpus: bool = False,
) -> Callable[P, R]:
    """Decorator of a pure function of plain tensors; it is compiled at its first call.

    Shapes are dynamic, so one build per dtype serves every weight of a model: a cold build takes
    about 10 s on a CPU, and a Llama has 4 to 5 linear shapes. Calls that would need another build
    run uncompiled: tensors so small that a size may be 0 or 1, meta and fake tensors, and calls
    inside another trace.

    Args:
        options: of inductor.
        smallest: elements of the first tensor from which calls are compiled.
        static_on_gpus: on accelerators, build once for every set of shapes. A memory-bound kernel
            spends a good part of its time on dividing indices by sizes that are not constants.
    """

    @functools.cache
    def build(shapes: tuple[Any, ...] | None) -> Kernel:
        # Dynamo counts builds per code object and gives up at the eighth: a copy for each shape.
        return Kernel(fn if shapes is None else _copy(fn), shapes is None, options)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "kernels take positional arguments"
        first = next(a for a in args if isinstance(a, torch.Tensor))
        plain = type(first) is torch.Tensor and first.device.type != "meta"
        large = first.numel() >= smallest
        if dry_run.current is not None and large and can_compile():
            return dry_run.current.results_only(fn, *args, **kwargs)
        if plain and large and not torch.compiler.is_compiling() and can_compile():
            shapes = None
            if static_on_gpus and first.device.type not in DYNAMIC_DEVICES:
                shapes = tuple(
                    (a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args
                )
            with torch.no_grad():  # one build for both grad modes
                return build(shapes)(*args)
        return fn(*args, **kwargs)

    return call


def _copy(fn: Callable[P, R]) -> Callable[P, R]:
    """The same function with another code object."""
    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace(co_name=f"{fn.__name__}_static")
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
