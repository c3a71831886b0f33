"""`torch.compile` for the kernels of this package, on machines that may lack a compiler."""

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

DYNAMIC_DEVICES = ("cpu",)  # where `static_on_gpus` does not hold

P = ParamSpec("P")
R = TypeVar("R")

SMALLEST_COMPILED = 1 << 14  # elements of the first tensor, if a kernel does not say otherwise

# For kernels over packed bytes, on GPUs. Inductor's own choice are tiles of blocks by bytes of a
# block, with masks and with indices looked at in every lookup: 37 to 55 instructions a weight of
# NF4 in its code for an H100, 14 with these options (torch 2.11).
FLAT_ON_GPUS: dict[str, Any] = {"triton.max_tiles": 1, "assert_indirect_indexing": False}
# Products and divisions rounded on GPUs as on CPUs: no fused multiply-adds.
ROUNDED_ALIKE: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
}


@functools.cache
def has_compiler() -> bool:
    """Whether inductor can build code on this machine. It needs a C++ compiler, on GPUs too:
    Triton builds its launcher with it."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, InductorError, RuntimeError):
        return False
    return True


@functools.cache
def can_compile() -> bool:
    """Whether kernels are compiled: where there is a compiler, and `QFSDP_EAGER_KERNELS=1`
    does not turn it off."""
    if os.environ.get("QFSDP_EAGER_KERNELS") == "1":
        return False
    if not has_compiler():
        logging.getLogger("qfsdp").warning(
            "no C++ compiler found: 4-bit kernels run uncompiled and slower (install g++)"
        )
    return has_compiler()


def use_cache_dir(path: str | None, report: bool) -> None:
    """Keeps compiled code in `path` (None: where PyTorch does, `TORCHINDUCTOR_CACHE_DIR` or a
    folder of the user below /tmp); the next start takes it from there. `report` prints where.

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
    """Decorates a pure function of plain tensors; it is compiled at its first call, with
    `options` for inductor.

    Shapes are dynamic: one build for each dtype then serves every weight of a model (a cold
    build takes about 10 s on a CPU, and a Llama has 4 to 5 linear shapes). What would ask for
    builds of its own runs uncompiled: tensors so small that a size may be 0 or 1, meta and
    fake tensors, and calls inside another trace.

    With `static_on_gpus`, accelerators get a build for every set of shapes: dividing indices by
    sizes that are no constants is a good part of what a memory-bound kernel has time for.
    """

    @functools.cache
    def build(shapes: tuple[Any, ...] | None) -> Kernel:
        # Dynamo counts builds per code object, and gives up at the eighth: one for each shape.
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
    """The same function with a code object of its own."""
    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace(co_name=f"{fn.__name__}_static")
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
