"""Follows memory where nothing is computed: storages of fake tensors, from birth to death.

A `TorchDispatchMode` below autograd and below tensor subclasses: a DTensor or a packed weight has
taken itself apart before an operation gets here, so that all there is to follow are storages of
plain tensors. A storage counts from the operation that returns it until it dies (a weak
reference tells) or FSDP2 takes its memory away (`UntypedStorage.resize_`, which is no operation and
is patched for the time).

Where an operation takes more than it returns, what it runs is followed instead: our custom ops
(`kernels.custom_op.CUSTOM_OPS`) run as Python on fake tensors. Only for PyTorch's own attention
kernels there are formulas (`qfsdp.memory.kernel_memory`).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from qfsdp.memory.kernel_memory import DATA_DEPENDENT, WORKSPACE, Target
from qfsdp.memory.patches import patched
from qfsdp.tensor_subclasses.kernels import custom_op, dry_run
from qfsdp.training.memory_usage import plain_tensors

aten = torch.ops.aten
_engine = torch.autograd.graph._engine_run_backward.__code__

QUANTIZED = "parameters, quantized"
PLAIN = "parameters, plain"
TRAINED = "parameters, trained"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
GATHERED = "gathered parameters"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
WORKSPACES = "workspace"
KINDS = (
    *(QUANTIZED, PLAIN, TRAINED, OPTIMIZER, GRADIENTS),
    *(GATHERED, ACTIVATIONS, TEMPORARIES, WORKSPACES),
)
SHARDED = {QUANTIZED, PLAIN, TRAINED, GRADIENTS, OPTIMIZER}
ALLOCATED_IN = {"cpu": 1, "cuda": 512}  # bytes: what PyTorch's allocators count in
# A layer's 7.7 MB of 224, in one run of three (LoRA on SmolLM2, 4 ranks); of the 90 MB of wider
# layers never, in 12 cases.
LATE_BYTES = 8 << 20
WIRE = {  # collective -> its name, and the bytes that n ranks send of a tensor of one byte
    "_allgather_base_": ("all_gather", lambda n: (n - 1) / n),
    "_reduce_scatter_base_": ("reduce_scatter", lambda n: (n - 1) / n),
    "allreduce_": ("all_reduce", lambda n: 2 * (n - 1) / n),
}


@dataclass
class _Block:
    """A storage that is alive."""

    size: int
    kind: str
    in_host: bool
    dies: Any


@dataclass(frozen=True)
class Point:
    """A moment of a step: the fullest within one module of one phase.

    Fields:
        phase: "forward", "backward", "optimizer" or another that `train_step` names.
        module: name of the innermost module at work, "" outside of all.
        at: operations since the step began.
        by_kind: bytes on the device, by kind of tensor.
    """

    phase: str
    module: str
    at: float
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


class MemoryTracker(TorchDispatchMode):
    """Within it, what fake tensors would hold on a device and in host memory.

    Args:
        target: whose allocator and kernels are followed.
        optimizer_in_host: parameters, gradients and optimizer state lie in host memory.

    Attributes:
        peak: the fullest moment.
        points: the fullest moments of all modules in the last step, in order.
        now, host: bytes by kind, on the device and in host memory.
        host_peak: most in host memory, by kind (not all at one time).
        wire, ways: bytes of the last step, by phase and collective; and by phase and "to_device",
            "to_host" or "from_disk".
    """

    def __init__(self, target: Target, optimizer_in_host: bool = False) -> None:
        super().__init__()
        self.target = target
        self.now, self.host, self.host_peak = Counter[str](), Counter[str](), Counter[str]()
        self.peak = Point("", "", 0, {})
        self._in_host = frozenset(SHARDED if optimizer_in_host else ())
        self._total = self._highest = self._operations = 0
        self._live: dict[int, _Block] = {}
        self._ranges: list[str] = []  # of record_function: phases of the recipe, FSDP2's, others
        self._names: dict[nn.Module, str] = {}
        self._modules: list[str] = []
        self._of_backward = ""
        self._late = _Block(0, WORKSPACES, False, None)
        self._paused = False
        self._compiled: dict[Any, Any] = {}
        self.start_step()

    def start_step(self) -> None:
        self.points: list[Point] = []
        self.wire, self.ways = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self._operations = 0

    @staticmethod
    def per_step(traffic: Counter[tuple[str, str]], repeats: float) -> dict[str, int]:
        """By name, if what forward and backward did is done `repeats` times as often."""
        total = Counter[str]()
        for (phase, name), size in traffic.items():
            total[name] += int(size * (repeats if phase in ("forward", "backward") else 1))
        return dict(total)

    # ---- what is alive -----------------------------------------------------------------------

    def follow(self, tensor: Tensor, kind: str | None = None) -> None:
        """From now on the storage of `tensor` counts, as `kind` (None: what comes of where we
        are); one that is known already only changes its kind, if one is given."""
        storage = tensor.untyped_storage()
        block = self._live.get(key := storage._cdata)
        if block is not None:
            if kind is not None:
                self._move(block, kind, block.in_host or kind in self._in_host)
            return
        given = kind is not None
        kind = kind or self._kind()
        dies = weakref.ref(storage, lambda _: self._change(self._live.pop(key), 0))
        in_host = bool(self._in_host) and (self.phase == "optimizer" or given)
        block = self._live[key] = _Block(0, kind, in_host, dies)
        self._change(block, storage.nbytes())

    def _change(self, block: _Block, size: int) -> None:
        """A block gets another size. Just before memory is given back is when it may be fullest:
        so what becomes of a tensor after its birth (host memory, another kind) is known by then."""
        unit = ALLOCATED_IN[self.target]
        size = -(-size // unit) * unit
        if size < block.size:
            self.look()
        by_kind = self.host if block.in_host else self.now
        by_kind[block.kind] += size - block.size
        if block.in_host:
            self.host_peak[block.kind] = max(self.host_peak[block.kind], by_kind[block.kind])
        else:
            self._total += size - block.size
        block.size = size

    def _move(self, block: _Block, kind: str, in_host: bool) -> None:
        size = block.size
        by_kind = self.host if block.in_host else self.now
        by_kind[block.kind] -= size
        self._total -= 0 if block.in_host else size
        block.size, block.kind, block.in_host = 0, kind, in_host
        self._change(block, size)

    def look(self) -> None:
        """Takes note of this moment, if it is the fullest of its module or of all."""
        where = (self.phase, self._modules[-1] if self._modules else self._of_backward)
        last = self.points[-1] if self.points else None
        if last is None or (last.phase, last.module) != where:
            self._highest = -1
            self.points.append(Point(*where, self._operations, {}))
        if self._total > self._highest:
            self._highest = self._total
            self.points[-1] = Point(*where, self._operations, dict(+self.now))
            if self._total > self.peak.total:
                self.peak = self.points[-1]

    @property
    def phase(self) -> str:
        return self._ranges[0] if self._ranges else ""

    def _kind(self) -> str:
        """Of a storage that is made here and now."""
        within = self._ranges[-1] if self._ranges else ""
        if within.startswith("FSDP::"):
            return GRADIENTS if "post_backward" in within else GATHERED
        if within.startswith("Optimizer.step"):
            return OPTIMIZER
        computing = self.phase == "forward" or (self.phase == "backward" and self._modules)
        return ACTIVATIONS if computing else TEMPORARIES

    def workspace(self, size: float, keep: bool = False) -> None:
        """An operation takes so much for itself; `keep`: and does not give it back."""
        block = _Block(0, WORKSPACES, False, None)
        self._change(block, int(size))
        if not keep:
            self._change(block, 0)

    def _of_collective(self, size: int) -> None:
        """gloo's threads take so much, and give it back late at times, when the next collective has
        begun already; as much as was seen (`LATE_BYTES`)."""
        self.workspace(size)
        self._change(self._late, 0)
        self._late = _Block(0, WORKSPACES, False, None)
        self._change(self._late, min(size, LATE_BYTES))

    # ---- operations --------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # a subclass takes itself apart first
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # asked for some 100,000 times in a step
        if self._paused:
            return func(*args, **kwargs)
        namespace = func.namespace
        if namespace == "profiler":
            return self._range(func, args, kwargs)
        self._operations += 1
        key = (self.target, func)
        if namespace == "qfsdp" and key not in WORKSPACE:
            with self, torch.no_grad():
                return custom_op.CUSTOM_OPS[func._schema.name](*args, **kwargs)
        if namespace in ("c10d", "_c10d_functional"):
            self._count_wire(func, args)
        if func is aten.add.Tensor and sys._getframe(1).f_code is _engine:
            return self._accumulate(func, args, kwargs)
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            self._gather_from_host(args[0])
        choose = DATA_DEPENDENT.get(func)
        out = None if choose is None else choose(*args, **kwargs)
        if out is None:
            out = func(*args, **kwargs)
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, FakeTensor):
                self.follow(value)
        if key in WORKSPACE:
            take = self._of_collective if namespace == "c10d" else self.workspace
            take(int(WORKSPACE[key](*args, **kwargs)))
        return out

    def _range(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.look()
        if "enter" in str(func):
            self._ranges.append(args[0])
        else:
            self._ranges.pop()
            self._of_backward = self._of_backward if self._ranges else ""
        return func(*args, **kwargs)

    def _accumulate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Autograd's sum of two gradients of a tensor, which real tensors, but no fake ones, make
        in the memory of the first."""
        first, second = args
        if first.shape == second.shape and first.dtype == second.dtype:
            return first.add_(second)
        out = func(*args, **kwargs)
        self.follow(out)
        return out

    def _count_wire(self, func: Any, args: Any) -> None:
        name, share = WIRE.get(func._opname, (None, None))
        if name is None or share is None:
            return
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        size = dist.ProcessGroup.unbox(group).size()
        sent = max(t.nbytes for t in tree_leaves(args[:2]) if isinstance(t, Tensor))
        self.wire[self.phase, name] += int(share(size) * sent)

    def _gather_from_host(self, shards: list[Tensor]) -> None:
        """What FSDP2 has in host memory goes through the device's (on CPUs it does not)."""
        blocks = [self._live[shard.untyped_storage()._cdata] for shard in shards]
        if size := sum(s.nbytes for s, b in zip(shards, blocks, strict=True) if b.in_host):
            self.moved("to_device", size)
            self.workspace(size)

    def results_only(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`kernels.dry_run.DryRun`. Run once for every set of shapes; it is the slowest part of a
        dequantized weight."""
        given = tree_map_only(Tensor, lambda t: (t.shape, t.dtype, t.stride()), (args, kwargs))
        key = (fn, str(given))
        if key not in self._compiled:
            self._paused = True
            self._compiled[key] = fn(*args, **kwargs)
            self._paused = False
        out = tree_map_only(Tensor, lambda t: t.new_empty(t.shape), self._compiled[key])
        return out

    # ---- what is no operation ----------------------------------------------------------------

    def in_host_memory(self, tensor: Tensor) -> None:
        """`kernels.dry_run.DryRun`."""
        if isinstance(tensor, FakeTensor):
            self.follow(tensor)
            block = self._live[tensor.untyped_storage()._cdata]
            self._move(block, block.kind, True)

    def moved(self, way: str, size: int) -> None:
        """`kernels.dry_run.DryRun`."""
        self.ways[self.phase, way] += size

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follows what is done with `model`, and all else, in a `with` block."""
        self._names = {module: name for name, module in model.named_modules()}
        with ExitStack() as undo:
            undo.callback(hooks.register_module_forward_pre_hook(self._enter_module).remove)
            leaves = hooks.register_module_forward_hook(self._leave_module, always_call=True)
            undo.callback(leaves.remove)
            undo.enter_context(patched(self.target, self._before_resize))
            undo.enter_context(dry_run.following(self))
            undo.enter_context(self)
            yield

    def _before_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if (block := self._live.get(storage._cdata)) is not None:
            self._move(block, GATHERED, block.in_host)
            self._change(block, size)

    def mark_gradient(self, param: Tensor) -> None:
        """A hook of a parameter, called when its gradient is there."""
        assert param.grad is not None
        for inner in plain_tensors(param.grad):
            block = self._live.get(inner.untyped_storage()._cdata)
            if self._in_host and block is not None and not block.in_host:
                self.moved("to_host", block.size)
            self.follow(inner, GRADIENTS)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self.look()
        self._modules.append(self._names.get(module, ""))

    def _leave_module(self, module: nn.Module, _: Any, out: Any) -> None:
        self.look()
        name = self._modules.pop()
        if self.phase == "forward" and isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(partial(self._enter_backward, name))

    def _enter_backward(self, name: str, _: Tensor) -> None:
        self.look()
        self._of_backward = name
