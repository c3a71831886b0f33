"""The decorator `compiled`: `torch.compile` for kernels, where the machine can compile."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from qfsdp.tensor_subclasses.kernels import ability, dry_run
from qfsdp.tensor_subclasses.kernels.ability import check_compile as check_compile
from qfsdp.tensor_subclasses.kernels.ability import use_cache_dir as use_cache_dir
from qfsdp.tensor_subclasses.kernels.dispatch import Builds

P = ParamSpec("P")
R = TypeVar("R")

SMALLEST_COMPILED = 1 << 14  # elements of the first tensor, unless a kernel sets `smallest`


def can_compile() -> bool:
    """Whether kernels are compiled: this machine can (`ability`), and `QFSDP_EAGER_KERNELS=1` is
    not set. In an estimate for a GPU this machine's compiler does not matter."""
    if os.environ.get("QFSDP_EAGER_KERNELS") == "1" or ability.failed_later:
        return False
    if dry_run.current is not None and dry_run.current.target != "cpu":
        return True
    return ability.can_build_kernels()


def on_cpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU, or in a dry run stands for one on the CPU."""
    dry = dry_run.current
    return tensor.device.type == "cpu" if dry is None else dry.target == "cpu"


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
    builds = Builds(fn, options, static_on_gpus)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "kernels take positional arguments"
        first = next(a for a in args if isinstance(a, torch.Tensor))
        plain = type(first) is torch.Tensor and first.device.type != "meta"
        large = first.numel() >= smallest
        if dry_run.current is not None and large and can_compile():
            return dry_run.current.results_only(fn, *args, **kwargs)
        if plain and large and not torch.compiler.is_compiling() and can_compile():
            try:
                with torch.no_grad():  # one build for both grad modes
                    return builds.of(first, args)(*args)
            except Exception as error:  # the folder has filled up, or the compiler fails on it
                if not ability.is_failed_build(error):
                    raise
                ability.stop_building_kernels(error)
        return fn(*args, **kwargs)

    return call
