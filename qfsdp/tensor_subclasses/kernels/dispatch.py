"""`Kernel`: a compiled function whose repeated calls skip Dynamo and go to inductor's code;
`Builds`: those of a function, for every set of shapes if need be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch.fx.experimental import _config

DYNAMIC_DEVICES = ("cpu",)  # devices for which `static_on_gpus` changes nothing
# For kernels over rows of bytes, on GPUs. Without these options inductor makes tiles of two
# dimensions with masks, and checks the index of every lookup. A weight of NF4 then takes 37 to 55
# instructions in the code for an H100; with the options it takes 14 (torch 2.11).
FLAT_ON_GPUS: dict[str, Any] = {"triton.max_tiles": 1, "assert_indirect_indexing": False}
# GPUs round products and divisions as CPUs do: no fused multiply-adds.
ROUNDED_AS_ON_CPUS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
}

MAX_DIRECT_CALLS = 4096  # some 1 KB each; calls with more kinds of arguments go through Dynamo


@dataclass
class _InductorCall:
    """A call of inductor's code: from `inputs`, tensors and numbers, it computed `outputs`."""

    run: Callable[..., Sequence[Any]]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def for_arguments(self, args: Sequence[Any], result: Any) -> Callable[..., Any] | None:
        """The function that calls inductor's code directly, for other arguments of the same kind.

        Args:
            args: of the kernel's call that led to this call.
            result: of that call.

        Returns:
            None if an input or output matches no argument.
        """
        tensor_at = [at for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        argument_of = {id(args[at]): at for at in tensor_at}
        output_of = {id(output): at for at, output in enumerate(self.outputs)}
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        known = all(isinstance(value, int) or id(value) in argument_of for value in self.inputs)
        distinct = len(argument_of) == len(tensor_at)
        if not known or not distinct or not all(id(r) in output_of for r in results):
            return None
        # Numbers are sizes or arguments; they are the same for all arguments of this kind.
        inputs = [(argument_of.get(id(value)), value) for value in self.inputs]
        inputs = [(at, value if at is None else None) for at, value in inputs]
        outputs_at = [output_of[id(one)] for one in results]
        run, kind = self.run, type(result)

        def call(args: Sequence[Any]) -> Any:
            outputs = run(*[value if at is None else args[at] for at, value in inputs])
            if kind is tuple:
                return tuple(outputs[at] for at in outputs_at)
            return outputs[outputs_at[0]] if outputs_at else None

        return call


class Kernel:
    """`torch.compile(fn)` that goes straight to inductor's code in repeated calls.

    Dynamo takes 0.07 ms to find that code. A core dequantizes 300,000 weights in this time, and a
    linear calls kernels four to six times in a train step. As `fn` is pure, the code depends on the
    arguments only by what `_kind` returns. So the first call with arguments of a kind goes through
    Dynamo, and the next ones repeat the call of inductor's code that it led to.
    """

    def __init__(self, fn: Callable[..., Any], dynamic: bool, options: dict[str, Any] | None):
        self._by_dynamo = torch.compile(fn, dynamic=dynamic, backend=self._build)
        self._options = options
        self._direct: dict[Any, Callable[..., Any]] = {}
        self._last = threading.local()  # `call`: the last call that Dynamo made in this thread

    def __call__(self, *args: Any) -> Any:
        # Inductor writes the number of threads into its code.
        kinds = (torch.get_num_threads(), *map(_kind, args))
        if (direct := self._direct.get(kinds)) is not None:
            return direct(args)
        self._last.call = None
        # Equal sizes in the first call do not mean that they are always equal. Most models have a
        # square weight; every kernel was compiled for it and then again for the others, 4 s on a
        # CPU.
        with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            result = self._by_dynamo(*args)
        call: _InductorCall | None = self._last.call
        self._last.call = None
        if call is not None and len(self._direct) < MAX_DIRECT_CALLS:
            direct = call.for_arguments(args, result)
            if direct is not None:
                self._direct[kinds] = direct
        return result

    def _build(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        built = compile_fx(graph, examples, config_patches=self._options)
        run = cast(Callable[..., Sequence[Any]], built)

        def recorded(*inputs: Any) -> Any:
            outputs = run(*inputs)
            self._last.call = _InductorCall(run, inputs, outputs)
            return outputs

        return recorded


def _kind(arg: Any) -> Any:
    """Everything about an argument that compiled code may depend on."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.device, arg.shape, arg.stride()
    return type(arg), arg


class Builds:
    """The kernels of a function; the arguments are those of `compiled`."""

    def __init__(
        self, fn: Callable[..., Any], options: dict[str, Any] | None, static_on_gpus: bool
    ) -> None:
        self._fn, self._options, self._static_on_gpus = fn, options, static_on_gpus
        self._kernels: dict[Any, Kernel] = {}

    def of(self, first: torch.Tensor, args: Sequence[Any]) -> Kernel:
        """The kernel for these arguments, of which `first` is the first tensor."""
        shapes = None
        if self._static_on_gpus and first.device.type not in DYNAMIC_DEVICES:
            shapes = tuple((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
        if (kernel := self._kernels.get(shapes)) is None:
            # Dynamo counts builds per code object and gives up at the eighth: a copy for each.
            fn = self._fn if shapes is None else _copy(self._fn)
            kernel = self._kernels[shapes] = Kernel(fn, shapes is None, self._options)
        return kernel


def _copy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with another code object."""
    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace(co_name=f"{fn.__name__}_static")
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
