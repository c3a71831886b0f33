"""`torch.compile` for the kernels of this package, on machines that may lack a compiler."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.fx.experimental import _config

from qfsdp.errors import UserError

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


class DryRun(Protocol):
    """What follows memory where nothing is computed (`qfsdp.memory`), on tensors that all are of
    the CPU: `target` says what they stand for."""

    target: str

    def results_only(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`fn(*args, **kwargs)`, of whose memory only the result counts: as compiled."""


dry_run: DryRun | None = None


def on_cpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is, or in a dry run stands for, one of the CPU."""
    return tensor.device.type == "cpu" if dry_run is None else dry_run.target == "cpu"


OPAQUE: dict[str, Callable[..., Any]] = {}
"""Custom ops by name -> what they run. A dry run goes through it, as to fake tensors the op itself
would show its results only."""


def opaque(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Defines a custom op that changes none of its arguments; decorates what it runs on any device.

    It has no gradient: an `autograd.Function` calls it, and another op for backward. Uncompiled,
    `torch.library.custom_op` and its `register_autograd` took 0.9 ms of the host for forward and
    backward of an adapted linear; this takes 0.5 (torch 2.13, 2.11 alike; the work itself 0.15).
    That function's `forward` gets a list of tensors as one argument, not as `*tensors`: where no
    gradient is needed, Dynamo tells by numbers of arguments whether `forward` takes ctx.

    Compiled code on disk is made to depend on the files that define ops. Inductor finds it by the
    graph of a forward pass, in which an op is a name; the backward pass that is stored with it
    would go on calling an op as it was before its arguments changed.
    """

    def define(fn: Callable[..., Any]) -> Any:
        OPAQUE[name] = fn
        files = sorted({op.__code__.co_filename for op in OPAQUE.values()})
        digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
        users = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
        torch.compiler.config.cache_key_tag = f"{users} qfsdp {digest[:16]}"
        schema = torch.library.infer_schema(fn, mutates_args=())
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "default", fn)
        namespace, _, op = name.partition("::")
        return getattr(getattr(torch.ops, namespace), op).default

    return define


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
    def build(shapes: tuple[Any, ...] | None) -> _Kernel:
        # Dynamo counts builds per code object, and gives up at the eighth: one for each shape.
        return _Kernel(fn if shapes is None else _copy(fn), shapes is None, options)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "kernels take positional arguments"
        first = next(a for a in args if isinstance(a, torch.Tensor))
        plain = type(first) is torch.Tensor and first.device.type != "meta"
        large = first.numel() >= smallest
        if dry_run is not None and large and can_compile():
            return dry_run.results_only(fn, *args, **kwargs)
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


class _Kernel:
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


def _copy(fn: Callable[P, R]) -> Callable[P, R]:
    """The same function with a code object of its own."""
    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace(co_name=f"{fn.__name__}_static")
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
