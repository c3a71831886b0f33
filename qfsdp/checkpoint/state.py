"""The state of a training run: copied for a checkpoint, and restored bit for bit.

Trained tensors (adapters or weights) and optimizer states are hundreds of tensors of a few shapes.
A checkpoint stacks those with the same meaning and shape into one entry
`[number of tensors, rows, ...]`, of which each rank has its rows. Any number of ranks can read the
rows back.

For SmolLM2 with DoRA that is 27 entries instead of 2520. torch.distributed.checkpoint plans and
writes them in 24 ms of CPU time per rank (of two) instead of 550 to 930 ms, or 370 to 640 ms with
its cache of plans. Most of that is Python, which delays the training loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.distributed.world import World
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, sharded
from qfsdp.tensor_subclasses.kernels.host_memory import HostBlocks

HOST = "host"  # the entry of everything that is no tensor
TRAINED = "trained"  # `StackedTensors.field` of the trained tensors


@dataclass
class StackedTensors:
    """Tensors of one meaning, shape and dtype: one entry of a checkpoint.

    Checkpoints store the fields by these names.

    Fields:
        field: "trained", or the optimizer's name of the state ("exp_avg").
        names: the trained tensors that they are or belong to (`trained_tensors`).
        shape: of each tensor, whole.
        rows: whether ranks hold the same rows as of the trained tensor; else every rank holds the
            whole tensor.
        dtype: of each tensor.
    """

    field: str
    names: list[str]
    shape: tuple[int, ...]
    rows: bool
    dtype: torch.dtype

    def local_shape(self, params: dict[str, Tensor]) -> tuple[int, ...]:
        """The shape of this rank's part of the entry; `params` are the trained tensors."""
        if not self.rows:
            return (len(self.names), *self.shape)
        held = local_rows(params[self.names[0]])
        return (len(self.names), held.stop - held.start, *self.shape[1:])

    def entry(self, local: Tensor, params: dict[str, Tensor]) -> Tensor:
        """The tensor to save or load with torch.distributed.checkpoint, given this rank's part."""
        param = params[self.names[0]]
        if not self.rows or not isinstance(param, DTensor):
            return local
        # A CPU mesh without process groups: DTensors move to the device of their mesh.
        mesh = DeviceMesh("cpu", param.device_mesh.mesh, _init_backend=False)
        placements = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in param.placements]
        return sharded(local, mesh, placements, (len(self.names), *self.shape))


@dataclass
class TrainState:
    """Everything that training changes.

    Fields:
        model: its trained tensors are saved. DoRA's norms are computed from them again.
        optimizer: of any kind, over the trained tensors.
        scheduler: the learning rate schedule, or None.
        progress: more numbers and strings to save, by name, or None; changed in place.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    progress: dict[str, Any] | None = None


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name -> trained parameter; adapters by their PEFT keys."""
    adapters: dict[str, Tensor] = adapter_parameters(model)
    known = {id(param) for param in adapters.values()}
    weights = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return adapters | {name: param for name, param in weights if id(param) not in known}


@dataclass
class StagedTensors:
    """The copies of a rank's tensors.

    Fields:
        stacks, local: the stacked tensors, and this rank's part of them: the Stager's buffers.
        alone: name -> field -> what `_RankTensor` holds; copied anew for each save.
        values: name -> field -> what is no tensor.
    """

    stacks: dict[str, StackedTensors]
    local: dict[str, Tensor]
    alone: dict[str, dict[str, Any]]
    values: dict[str, dict[str, Any]]


class Stager:
    """Copies the state to host memory, from where it is saved. Saves share the same buffers."""

    def __init__(self, world: World) -> None:
        self._world, self._pinned = world, HostBlocks()
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, state: TrainState, step: int) -> dict[str, Any]:
        """Entries for `dcp.save`. On an accelerator the copies are asynchronous: they are queued in
        the current stream."""
        params = trained_tensors(state.model)
        # torchao keeps a state in 8 bits only where its blocks divide a rank's rows. What one rank
        # has to write alone, all ranks write alone.
        apart = set().union(*self._world.gather(_apart(params, state.optimizer)))
        staged = self.copy_tensors(params, state.optimizer, apart)
        entries: dict[str, Any] = {
            key: stack.entry(staged.local[key], params) for key, stack in staged.stacks.items()
        }
        groups = state.optimizer.param_groups
        entries[HOST] = {
            "step": step,
            "stacks": {key: vars(stack) for key, stack in staged.stacks.items()},
            "values": staged.values,
            "groups": [{k: copy.deepcopy(g[k]) for k in g if k != "params"} for g in groups],
            "scheduler": copy.deepcopy(state.scheduler.state_dict()) if state.scheduler else None,
            "progress": dict(state.progress or {}),
        }
        random = random_state(self._world.device)
        only = {name: fields for name, fields in staged.alone.items() if fields}
        return entries | {rank_entry(self._world.rank): {"random": random, "alone": only}}

    @torch.no_grad()
    def copy_tensors(
        self,
        params: dict[str, Tensor],
        optimizer: Optimizer,
        apart: set[tuple[str, str]] | None = None,
    ) -> StagedTensors:
        """Copies the trained tensors and the optimizer's state of each.

        Args:
            apart: (name, field) of what some rank writes alone; None: what this rank does.
        """
        apart = _apart(params, optimizer) if apart is None else apart
        stacks: dict[str, StackedTensors] = {}
        tensors: dict[str, list[Tensor]] = {}
        alone: dict[str, dict[str, Any]] = {name: {} for name in params}
        values: dict[str, dict[str, Any]] = {name: {} for name in params}
        for name, field, value, param in _tensors(params, optimizer):
            if not isinstance(value, Tensor):
                values[name][field] = copy.deepcopy(value)
            elif (name, field) in apart:
                alone[name][field] = vars(_RankTensor.of(value))
            else:
                rows, shape = bool(_held_by_rows(value, param)), tuple(value.shape)
                key = f"{field} {list(shape)} {value.dtype}{'' if rows else ' whole'}"
                stack = stacks.setdefault(key, StackedTensors(field, [], shape, rows, value.dtype))
                stack.names.append(name)
                tensors.setdefault(key, []).append(local_part(value))
        if not self._buffers:
            self._pinned.expected = sum(t.nbytes for alike in tensors.values() for t in alike)
        local = {key: self._fill(key, tensors[key]) for key in stacks}
        return StagedTensors(stacks, local, alone, values)

    def _fill(self, key: str, tensors: list[Tensor]) -> Tensor:
        shape = (len(tensors), *tensors[0].shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != shape:
            size, on_cpu = len(tensors) * tensors[0].nbytes, tensors[0].device.type == "cpu"
            held = torch.empty(size, dtype=torch.uint8) if on_cpu else self._pinned.take(size)
            self._buffers[key] = buffer = held.view(tensors[0].dtype).view(shape)
        torch._foreach_copy_(list(buffer.unbind()), tensors, non_blocking=True)
        return buffer


@dataclass
class ReadState:
    """The content of a checkpoint for one rank, on the CPU.

    Fields:
        host: everything that is no tensor.
        mine: this rank's random state and tensors that only it can read.
        stacks, local: the stacked tensors, and this rank's part of them.
        same_ranks: whether as many ranks have written it.
    """

    host: dict[str, Any]
    mine: dict[str, Any]
    stacks: dict[str, StackedTensors]
    local: dict[str, Tensor]
    same_ranks: bool


@torch.no_grad()
def restore(read: ReadState, state: TrainState, world: World) -> None:
    """Puts the content of a checkpoint into `state`, and sets the random state.

    If another number of ranks has written it, new random states are seeded.
    """
    params, host = trained_tensors(state.model), read.host
    states: dict[str, dict[str, Any]] = {name: dict(host["values"][name]) for name in params}
    for key, stack in read.stacks.items():
        for name, value in zip(stack.names, read.local[key].unbind(), strict=True):
            if stack.field == TRAINED:
                local_part(params[name]).copy_(value)
            else:
                like = params[name] if stack.rows else None
                states[name][stack.field] = _restored(value, like)
    for name, fields in read.mine["alone"].items():
        for field, kept in fields.items():
            states[name][field] = _RankTensor(**kept).like(params[name])
    _restore_optimizer(state.optimizer, params, states, host["groups"])
    if state.scheduler is not None:
        state.scheduler.load_state_dict(host["scheduler"])
        follow_schedule(state.scheduler)
    if state.progress is not None:
        state.progress.update(host.get("progress", {}))
    if read.same_ranks:
        set_random_state(read.mine["random"], world.device)
    else:  # seeded, but not with the numbers of the run's start
        torch.manual_seed(torch.initial_seed() + 1_000_003 * host["step"])


def follow_schedule(scheduler: LRScheduler) -> None:
    """Sets the learning rates of the next step by the schedule. Those of the checkpoint, 0 at the
    end of a run, are another schedule's if the run was made longer."""
    if isinstance(scheduler, LambdaLR):
        each = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, (base, factor) in zip(scheduler.optimizer.param_groups, each, strict=True):
            lr, rate = group["lr"], base * factor(scheduler.last_epoch)
            group["lr"] = lr.fill_(rate) if isinstance(lr, Tensor) else rate


def _tensors(
    params: dict[str, Tensor], optimizer: Optimizer
) -> Iterator[tuple[str, str, Any, Tensor]]:
    """Yields (name of the trained tensor, field, value, trained tensor)."""
    state = optimizer.state  # of several adapters it is put together at each question
    for name, param in params.items():
        yield name, TRAINED, param, param
        for field, value in state.get(param, {}).items():
            yield name, field, value, param


def _apart(params: dict[str, Tensor], optimizer: Optimizer) -> set[tuple[str, str]]:
    """(name, field) of the tensors of this rank that another number of ranks could not read."""
    return {
        (name, field)
        for name, field, value, param in _tensors(params, optimizer)
        if isinstance(value, Tensor) and _held_by_rows(value, param) is None
    }


@dataclass
class _RankTensor:
    """A tensor that only the same rank of as many ranks can read, as its inner tensors.

    Checkpoints store the fields by these names.

    Fields:
        kind: the tensor subclass, or None.
        inner, context: results of `__tensor_flatten__`, on the CPU.
        local: shape and stride of this rank's part.
        whole: shape of the whole tensor if it is sharded, else None.
    """

    kind: Any
    inner: dict[str, Tensor]
    context: Any
    local: tuple[torch.Size, tuple[int, ...]]
    whole: tuple[int, ...] | None

    @classmethod
    def of(cls, value: Tensor) -> _RankTensor:
        part = local_part(value)
        whole = tuple(value.shape) if isinstance(value, DTensor) else None
        local = (part.shape, part.stride())
        if not is_traceable_wrapper_subclass(part):
            return cls(None, {"": part.to("cpu", copy=True)}, None, local, whole)
        names, context = part.__tensor_flatten__()
        inner = {name: getattr(part, name).to("cpu", copy=True) for name in names}
        return cls(type(part), inner, context, local, whole)

    def like(self, param: Tensor) -> Tensor:
        """The tensor on the device of `param`, sharded if it was."""
        inner = {name: tensor.to(param.device) for name, tensor in self.inner.items()}
        part = inner.get("")
        if self.kind is not None:
            part = self.kind.__tensor_unflatten__(inner, self.context, *self.local)
        assert part is not None
        if self.whole is None or not isinstance(param, DTensor):
            return part
        return sharded(part, param.device_mesh, param.placements, self.whole)


def _held_by_rows(value: Tensor, param: Tensor) -> bool | None:
    """Whether ranks hold the same rows of `value` as of `param` (True), or the whole value (False).
    None if another number of ranks could not read it."""
    if is_traceable_wrapper_subclass(local_part(value)):
        return None  # 8-bit states: their blocks cross rows
    if isinstance(value, DTensor):
        same = isinstance(param, DTensor) and value.placements == param.placements
        return True if same else None
    if value.dim() == 0:
        return False
    return None if isinstance(param, DTensor) else value.size(0) == param.size(0)


def _restored(rows: Tensor, param: Tensor | None) -> Tensor:
    """A copy of this rank's rows on the device of `param`, sharded if `param` is."""
    rows = rows.to("cpu" if param is None else param.device, copy=True)
    if not isinstance(param, DTensor):
        return rows
    shape = (param.size(0), *rows.shape[1:])
    return sharded(rows, param.device_mesh, param.placements, shape)


def _restore_optimizer(
    optimizer: Optimizer,
    params: dict[str, Tensor],
    states: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    order = [param for group in optimizer.param_groups for param in group["params"]]
    index = {id(param): at for at, param in enumerate(order)}
    now = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(
        {
            "state": {index[id(params[name])]: s for name, s in states.items() if s},
            "param_groups": [
                {**saved, "params": group["params"]}
                for saved, group in zip(groups, now, strict=True)
            ],
        }
    )
    for name, fields in states.items():  # load_state_dict casts them to the parameters' dtype
        for field, value in fields.items():
            loaded = optimizer.state[params[name]][field]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[params[name]][field] = value.to(loaded.device)


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def rank_entry(rank: int) -> str:
    return f"rank_{rank}"
