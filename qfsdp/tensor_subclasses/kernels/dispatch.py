"""TODO tensor_subclasses.kernels.dispatch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx.experimental import _config


@dataclass
class _Call:
    """A call of inductor's code: with `inputs`, tensors and numbers, it gave `outputs`."""

    run: Callable[..., Sequence[Any]]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def direct(self, args: Sequence[Any], result: Any) -> Callable[..., Any] | None:
        """If Dynamo made this call of a function of `args` with that `result`: the same, for other
        tensors like those. None where it is not plain which tensor is which."""
        places = [at for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        place_of = {id(args[at]): at for at in places}
        index_of = {id(output): index for index, output in enumerate(self.outputs)}
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        known = all(isinstance(value, int) or id(value) in place_of for value in self.inputs)
        if not known or len(place_of) < len(places) or not all(id(r) in index_of for r in results):
            return None
        # Numbers stay: they are sizes, or arguments themselves.
        sources = [(place_of.get(id(value)), value) for value in self.inputs]
        sources = [(at, value if at is None else None) for at, value in sources]
        picks = [index_of[id(one)] for one in results]
        run, kind = self.run, type(result)

        def again(args: Sequence[Any]) -> Any:
            outputs = run(*[value if at is None else args[at] for at, value in sources])
            if kind is tuple:
                return tuple(outputs[index] for index in picks)
            return outputs[picks[0]] if picks else None

        return again


class Kernel:
    """`torch.compile(fn)`, of which a call like an earlier one goes straight to inductor's code.

    Dynamo takes 0.07 ms to find that code, as long as a core takes to dequantize 300,000 weights,
    and a linear does so four to six times in a train step. Its choice depends on what `_facts`
    tells of the arguments alone, as functions here are pure. So the first call with given facts
    goes Dynamo's way, and notes what it led to.
    """

    MOST_NOTES = 4096  # some 1 KB each; beyond that, calls of new shapes go Dynamo's way

    def __init__(self, fn: Callable[..., Any], dynamic: bool, options: dict[str, Any] | None):
        self._by_dynamo = torch.compile(fn, dynamic=dynamic, backend=self._build)
        self._options = options
        self._notes: dict[Any, Callable[..., Any]] = {}
        self._last = threading.local()  # `call`: what Dynamo has called in this thread

    def __call__(self, *args: Any) -> Any:
        # Inductor's code has the number of threads in it.
        facts = (torch.get_num_threads(), *map(_facts, args))
        if (direct := self._notes.get(facts)) is not None:
            return direct(args)
        self._last.call = None
        # Sizes that are equal in the first call are no rule: most models have a square weight, and
        # each kernel was built for it and then again for the others, 4 s on a CPU.
        with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            result = self._by_dynamo(*args)
        call: _Call | None = self._last.call
        self._last.call = None
        if call is not None and len(self._notes) < self.MOST_NOTES:
            direct = call.direct(args, result)
            if direct is not None:
                self._notes[facts] = direct
        return result

    def _build(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        built = compile_fx(graph, examples, config_patches=self._options)
        run = cast(Callable[..., Sequence[Any]], built)

        def run_and_tell(*inputs: Any) -> Any:
            outputs = run(*inputs)
            self._last.call = _Call(run, inputs, outputs)
            return outputs

        return run_and_tell


def _facts(arg: Any) -> Any:
    """All of an argument that code may have been made for."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.device, arg.shape, arg.stride()
    return type(arg), arg
