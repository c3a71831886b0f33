"""Follows the memory of a dry run: the storages of fake tensors, from allocation to release.

The tracker is a `TorchDispatchMode` below autograd and below tensor subclasses: DTensors and
quantized weights are split into plain tensors before an operation gets here. A storage counts from
the operation that returns it until it is released (a weak reference reports that) or until FSDP2
resizes it to nothing (`qfsdp.planning.patches`).

Some operations need more memory than their results. Our custom ops
(`kernels.custom_op.CUSTOM_OPS`) run as Python on fake tensors, so that their intermediates are
followed. For PyTorch's attention kernels there are formulas (`qfsdp.planning.kernel_memory`).
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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from qfsdp.planning.collective_bytes import sent_by
from qfsdp.planning.kernel_memory import DATA_DEPENDENT, WORKSPACE, Target
from qfsdp.planning.known_results import known_result
from qfsdp.planning.patches import patched
from qfsdp.tensor_subclasses.kernels import custom_op, dry_run
from qfsdp.tensor_subclasses.kernels.host_memory import pinned_size
from qfsdp.training.memory_usage import (
    GRADIENTS,
    OPTIMIZER,
    PLAIN,
    QUANTIZED,
    TRAINED,
    plain_tensors,
)

aten = torch.ops.aten
_engine = torch.autograd.graph._engine_run_backward.__code__

# Kinds of tensors, besides those of a real run (`qfsdp.training.memory_usage`).
GATHERED, ACTIVATIONS = "gathered_parameters", "activations"
TEMPORARIES, WORKSPACES = "temporaries", "workspace"
CHECKPOINT, GRAPHS, TEACHER = "copy_for_checkpoints", "kept_by_cuda_graphs", "teacher"
KINDS = (
    *(QUANTIZED, PLAIN, TRAINED, OPTIMIZER, GRADIENTS),
    *(GATHERED, ACTIVATIONS, TEMPORARIES, WORKSPACES, CHECKPOINT, GRAPHS, TEACHER),
)
SHARDED = {QUANTIZED, PLAIN, TRAINED, GRADIENTS, OPTIMIZER, TEACHER}
ALLOCATION_UNIT = {"cpu": 1, "cuda": 512}  # bytes: PyTorch's allocators round sizes up to it
# Operations without a kernel, besides views.
WITHOUT_KERNEL = frozenset(
    getattr(aten, name)
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("_unsafe_view", "resize_", "set_", "record_stream"),
    )
)
# gloo released one layer's 7.7 MB of 224 MB late in one run of three (LoRA on SmolLM2, 4 ranks);
# never the 90 MB of wider layers, in 12 cases.
LATE_BYTES = 8 << 20


Traffic = Counter[tuple[str, str, int]]


@dataclass
class _Block:
    """A storage that is allocated; `released` is the weak reference that reports its end."""

    size: int
    kind: str
    in_host: bool
    released: Any


@dataclass(frozen=True)
class Point:
    """The moment with the most memory within one module of one phase of a step.

    Fields:
        phase: "forward", "backward", "optimizer" or another phase of `train_step`.
        module: name of the innermost module that runs, "" outside of all modules.
        at: number of operations since the step began.
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
    """Counts the bytes that a dry run's fake tensors would take on a device and in host memory.

    Args:
        target: device type whose allocator and kernels are followed.
        optimizer_in_host: parameters, gradients and optimizer state lie in host memory.
        local_size: ranks per machine; None: all are on one.

    Attributes:
        peak: the moment with the most memory on the device.
        points: the peaks of all modules in the last step, in order.
        now, host: current bytes by kind, on the device and in host memory.
        host_peak: most bytes in host memory by kind; the kinds may peak at different times.
        wire: bytes sent in the last step, by phase, collective and number of the micro-batch.
        between: those of all ranks of the machine that go to other machines, likewise.
        copies: bytes copied in the last step, likewise by "to_device", "to_host" or "from_disk".
        launches: kernels that the last step starts, likewise, uncompiled but for functions that
            always are. An operation counts as one kernel.
    """

    def __init__(
        self, target: Target, optimizer_in_host: bool = False, local_size: int | None = None
    ) -> None:
        super().__init__()
        self.target, self._local_size = target, local_size or sys.maxsize
        self.now, self.host, self.host_peak = Counter[str](), Counter[str](), Counter[str]()
        self.peak = Point("", "", 0, {})
        self._in_host = frozenset(SHARDED if optimizer_in_host else ())
        self._pinned_alone = {ACTIVATIONS, *self._in_host} - {OPTIMIZER}  # others share blocks
        self._total = self._highest = self._operations = 0
        self._live: dict[int, _Block] = {}
        self._ranges: list[str] = []  # record_function: of the recipe, FSDP2, optimizers
        self._names: dict[nn.Module, str] = {}
        self._modules: list[str] = []
        self._of_backward = ""
        self._late = _Block(0, WORKSPACES, False, None)
        self._paused = False
        self._compiled: dict[Any, Any] = {}
        self.start_step()

    def start_step(self) -> None:
        self.points: list[Point] = []
        self.wire, self.between, self.copies = Traffic(), Traffic(), Traffic()
        self.launches = Traffic()
        self._operations = self._micro_batch = 0

    @staticmethod
    def per_step(traffic: Traffic, more: int = 0) -> dict[str, int]:
        """Bytes by name, with the first micro-batch counted `more` times more. The last may differ
        from it: gradients may be reduced then only."""
        total = Counter[str]()
        for (phase, name, micro_batch), size in traffic.items():
            again = more if micro_batch == 1 and phase in ("forward", "backward") else 0
            total[name] += size * (1 + again)
        return dict(total)

    # ---- allocated storages ------------------------------------------------------------------

    def follow(self, tensor: Tensor, kind: str | None = None) -> None:
        """Counts the storage of `tensor` from now on, as `kind` (None: the current phase decides).

        A storage that is counted already only changes its kind, if one is given.
        """
        storage = tensor.untyped_storage()
        block = self._live.get(key := storage._cdata)
        if block is not None:
            if kind is not None:
                self._move(block, kind, block.in_host or kind in self._in_host)
            return
        given = kind is not None
        kind = kind or self._kind()
        released = weakref.ref(storage, lambda _: self._change(self._live.pop(key), 0))
        in_host = bool(self._in_host) and (self.phase == "optimizer" or given)
        block = self._live[key] = _Block(0, kind, in_host, released)
        self._change(block, storage.nbytes())

    def _change(self, block: _Block, size: int) -> None:
        """Gives a block another size.

        Notes the peak only before memory is released: by then a new tensor has got its final place
        and kind.
        """
        rounds = self.target == "cuda" and block.in_host and block.kind in self._pinned_alone
        unit = ALLOCATION_UNIT[self.target]
        size = pinned_size(size) if rounds else -(-size // unit) * unit
        if size < block.size:
            self.note_peak()
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

    def note_peak(self) -> None:
        """Records this moment if it is the peak of its module, or of all."""
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
        """The kind of a storage that is allocated now."""
        within = self._ranges[-1] if self._ranges else ""
        if within.startswith("FSDP::"):
            return GRADIENTS if "post_backward" in within else GATHERED
        if within.startswith("Optimizer.step"):
            return OPTIMIZER
        computing = self.phase == "forward" or (self.phase == "backward" and self._modules)
        return ACTIVATIONS if computing else TEMPORARIES

    def workspace(self, size: float, keep: bool = False) -> None:
        """Counts `size` bytes that an operation takes for itself; `keep`: and never releases."""
        block = _Block(0, WORKSPACES, False, None)
        self._change(block, int(size))
        if not keep:
            self._change(block, 0)

    def _of_collective(self, size: int) -> None:
        """Counts the memory of gloo's threads.

        They sometimes release it only after the next collective has begun: up to `LATE_BYTES`
        stay counted until then.
        """
        self.workspace(size)
        self._change(self._late, 0)
        self._late = _Block(0, WORKSPACES, False, None)
        self._change(self._late, min(size, LATE_BYTES))

    # ---- operations --------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # a tensor subclass splits itself into plain tensors first
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # called about 100,000 times in a step
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
        if not func.is_view and func.overloadpacket not in WITHOUT_KERNEL:
            self.launches[self.phase, "launches", self._micro_batch] += 1
        choose = DATA_DEPENDENT.get(func)
        out = None if choose is None else choose(*args, **kwargs)
        if out is None:
            out = known_result(func, args, kwargs)
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, FakeTensor):
                self.follow(value)
        if key in WORKSPACE:
            take = self._of_collective if namespace == "c10d" else self.workspace
            take(int(WORKSPACE[key](*args, **kwargs)))
        return out

    def _range(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.note_peak()
        if "enter" in str(func):
            self._micro_batch += not self._ranges and args[0] == "forward"
            self._ranges.append(args[0])
        else:
            self._ranges.pop()
            self._of_backward = self._of_backward if self._ranges else ""
        return func(*args, **kwargs)

    def _accumulate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Autograd's sum of two gradients of a tensor. Real tensors are summed in the memory of
        the first; fake ones would not be."""
        first, second = args
        if first.shape == second.shape and first.dtype == second.dtype:
            return first.add_(second)
        out = func(*args, **kwargs)
        self.follow(out)
        return out

    def _count_wire(self, func: Any, args: Any) -> None:
        if (sent := sent_by(func, args, self._local_size)) is not None:
            key = (self.phase, sent.name, self._micro_batch)
            self.wire[key] += sent.bytes
            self.between[key] += sent.between

    def _gather_from_host(self, shards: list[Tensor]) -> None:
        """Counts the copies to the device that FSDP2 makes of shards in host memory."""
        blocks = [self._live[shard.untyped_storage()._cdata] for shard in shards]
        if size := sum(s.nbytes for s, b in zip(shards, blocks, strict=True) if b.in_host):
            self.moved("to_device", size)
            self.workspace(size)

    def results_only(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `kernels.dry_run.DryRun`. Runs `fn` once per set of shapes, as it is the slowest part
        of dequantizing."""
        given = tree_map_only(Tensor, lambda t: (t.shape, t.dtype, t.stride()), (args, kwargs))
        key = (fn, str(given))
        self.launches[self.phase, "launches", self._micro_batch] += 1
        if key not in self._compiled:
            with self.paused():
                self._compiled[key] = fn(*args, **kwargs)
        out = tree_map_only(Tensor, lambda t: t.new_empty(t.shape), self._compiled[key])
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing of what a `with` block does."""
        self._paused = True
        yield
        self._paused = False

    # ---- reported by other code, not seen as operations --------------------------------------

    def in_host_memory(self, tensor: Tensor) -> None:
        """See `kernels.dry_run.DryRun`."""
        if isinstance(tensor, FakeTensor):
            self.follow(tensor)
            block = self._live[tensor.untyped_storage()._cdata]
            self._move(block, block.kind, True)

    def moved(self, way: str, size: int) -> None:
        """See `kernels.dry_run.DryRun`."""
        self.copies[self.phase, way, self._micro_batch] += size

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
        """Hook of a parameter, called when its gradient is complete."""
        assert param.grad is not None
        for inner in plain_tensors(param.grad):
            block = self._live.get(inner.untyped_storage()._cdata)
            if self._in_host and block is not None and not block.in_host:
                self.moved("to_host", block.size)
            self.follow(inner, GRADIENTS)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self.note_peak()
        self._modules.append(self._names.get(module, ""))

    def _leave_module(self, module: nn.Module, _: Any, out: Any) -> None:
        self.note_peak()
        name = self._modules.pop()
        out = out[0] if isinstance(out, tuple | list) else out  # a mixture also returns its routing
        if self.phase == "forward" and isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(partial(self._enter_backward, name))

    def _enter_backward(self, name: str, _: Tensor) -> None:
        self.note_peak()
        self._of_backward = name
