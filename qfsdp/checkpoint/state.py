"""What a run needs to go on bit by bit, copied out of training and put back into it.

What is trained (adapters, or weights themselves) and optimizer states are hundreds of tensors of a
few shapes. A checkpoint holds those of one meaning and shape as a single entry
`[number of tensors, rows, ...]`, of which each rank has its rows. Rows can be read back on any
number of ranks.

For SmolLM2 with DoRA that is 27 entries instead of 2520. To plan and write them takes
torch.distributed.checkpoint 24 ms of CPU time per rank (of two) instead of 550 to 930, or 370 to
640 with its cache of plans; and most of it is Python, which holds up the training loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.cli.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, sharded

HOST = "host"  # the entry of what is no tensor
TRAINED = "trained"  # `Stack.field` of the trained tensors themselves


@dataclass
class Stack:
    """Tensors of one meaning, shape and dtype: an entry of a checkpoint.

    Fields:
        field: "trained", or the optimizer's name of it.
        names: of the trained tensor that each is, or belongs to (`trained_tensors`).
        shape: of each, whole.
        rows: whether ranks hold rows of each, as of the trained tensor; else all hold all.
        dtype: of each.
    """

    field: str
    names: list[str]
    shape: tuple[int, ...]
    rows: bool
    dtype: torch.dtype

    def local_shape(self, params: dict[str, Tensor]) -> tuple[int, ...]:
        """The shape of this rank's part of the entry, given the model's trained tensors."""
        if not self.rows:
            return (len(self.names), *self.shape)
        held = local_rows(params[self.names[0]])
        return (len(self.names), held.stop - held.start, *self.shape[1:])

    def entry(self, local: Tensor, params: dict[str, Tensor]) -> Tensor:
        """This rank's part as what torch.distributed.checkpoint saves and loads."""
        param = params[self.names[0]]
        if not self.rows or not isinstance(param, DTensor):
            return local
        # DTensors move to their mesh's device; this one has no process groups, and needs none.
        mesh = DeviceMesh("cpu", param.device_mesh.mesh, _init_backend=False)
        placements = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in param.placements]
        return sharded(local, mesh, placements, (len(self.names), *self.shape))


@dataclass
class TrainState:
    """All that training changes.

    Fields:
        model: what of it is trained; DoRA's norms follow from adapters and are not kept.
        optimizer: over that, of any kind.
        scheduler: or None.
        progress: numbers and strings by name that are part of it, too (or None); changed in place.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    progress: dict[str, Any] | None = None


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter of all that is trained: adapters by PEFT's keys, weights by their own."""
    adapters: dict[str, Tensor] = adapter_parameters(model)
    known = {id(param) for param in adapters.values()}
    weights = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return adapters | {name: param for name, param in weights if id(param) not in known}


class Staging:
    """The copy in host memory that a save is written from; made once, and used again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, state: TrainState, step: int) -> dict[str, Any]:
        """Entries for `dcp.save`. On an accelerator the copies may still be under way: they are
        ordered before what the current stream does next."""
        params = trained_tensors(state.model)
        stacks: dict[str, Stack] = {}
        tensors: dict[str, list[Tensor]] = {}
        alone: dict[str, dict[str, Any]] = {name: {} for name in params}
        values: dict[str, dict[str, Any]] = {name: {} for name in params}
        for name, field, value, param in _tensors(params, state.optimizer):
            if not isinstance(value, Tensor):
                values[name][field] = copy.deepcopy(value)
            elif (rows := _spread(value, param)) is None:
                alone[name][field] = vars(_Alone.of(value))
            else:
                shape = tuple(value.shape)
                key = f"{field} {list(shape)} {value.dtype}{'' if rows else ' whole'}"
                stack = stacks.setdefault(key, Stack(field, [], shape, rows, value.dtype))
                stack.names.append(name)
                tensors.setdefault(key, []).append(local_part(value))
        entries: dict[str, Any] = {
            key: stack.entry(self._fill(key, tensors[key]), params) for key, stack in stacks.items()
        }
        groups = state.optimizer.param_groups
        entries[HOST] = {
            "step": step,
            "stacks": {key: vars(stack) for key, stack in stacks.items()},
            "values": values,
            "groups": [{k: copy.deepcopy(g[k]) for k in g if k != "params"} for g in groups],
            "scheduler": copy.deepcopy(state.scheduler.state_dict()) if state.scheduler else None,
            "progress": dict(state.progress or {}),
        }
        random = _random_state(self._world.device)
        only = {name: fields for name, fields in alone.items() if fields}
        return entries | {_of_rank(self._world.rank): {"random": random, "alone": only}}

    def _fill(self, key: str, tensors: list[Tensor]) -> Tensor:
        shape = (len(tensors), *tensors[0].shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != shape:
            pinned = tensors[0].device.type != "cpu"
            buffer = torch.empty(shape, dtype=tensors[0].dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        torch._foreach_copy_(list(buffer.unbind()), tensors, non_blocking=True)
        return buffer


@torch.no_grad()
def restore(folder: Path, saved_ranks: int, state: TrainState, world: World) -> None:
    """Puts what `dcp.save` wrote from a `Staging` into `state`, and sets the random state.

    Every rank reads its own rows, without talking to others. With another number of ranks than
    `saved_ranks` random states are started anew.

    Raises:
        UserError: part of the optimizer's state can be read by as many ranks only as wrote it.
    """
    params = trained_tensors(state.model)
    same = saved_ranks == world.size
    own = _of_rank(world.rank if same else 0)
    parts = _load(folder, {HOST: None, own: None})
    host, mine = parts[HOST], parts[own]
    if mine["alone"] and not same:
        raise UserError(
            f"resume: '{folder.parent}' has optimizer state that only {saved_ranks} ranks can "
            f"read, and these are {world.size}"
        )
    stacks = {key: Stack(**fields) for key, fields in host["stacks"].items()}
    local = {key: torch.empty(s.local_shape(params), dtype=s.dtype) for key, s in stacks.items()}
    _load(folder, {key: stack.entry(local[key], params) for key, stack in stacks.items()})
    states: dict[str, dict[str, Any]] = {name: dict(host["values"][name]) for name in params}
    for key, stack in stacks.items():
        for name, value in zip(stack.names, local[key].unbind(), strict=True):
            if stack.field == TRAINED:
                local_part(params[name]).copy_(value)
            else:
                like = params[name] if stack.rows else None
                states[name][stack.field] = _as(value, like)
    for name, fields in mine["alone"].items():
        for field, kept in fields.items():
            states[name][field] = _Alone(**kept).like(params[name])
    _restore_optimizer(state.optimizer, params, states, host["groups"])
    if state.scheduler is not None:
        state.scheduler.load_state_dict(host["scheduler"])
    if state.progress is not None:
        state.progress.update(host.get("progress", {}))
    if same:
        _set_random_state(mine["random"], world.device)
    else:  # as at a start, but not the same numbers once more
        torch.manual_seed(torch.initial_seed() + 1_000_003 * host["step"])


def read_trained(folder: Path) -> dict[str, Tensor]:
    """Name -> whole tensor of all that is trained, from what `dcp.save` wrote."""
    stacks = _load(folder, {HOST: None})[HOST]["stacks"]
    trained = {k: Stack(**fields) for k, fields in stacks.items() if fields["field"] == TRAINED}
    whole = {k: torch.empty(len(s.names), *s.shape, dtype=s.dtype) for k, s in trained.items()}
    _load(folder, dict(whole))
    return {
        name: tensor
        for key, stack in trained.items()
        for name, tensor in zip(stack.names, whole[key].unbind(), strict=True)
    }


# ---- parts ---------------------------------------------------------------------------------


def _tensors(
    params: dict[str, Tensor], optimizer: Optimizer
) -> Iterator[tuple[str, str, Any, Tensor]]:
    """(name of the trained tensor, what of it, the value, the trained tensor)."""
    for name, param in params.items():
        yield name, TRAINED, param, param
        for field, value in optimizer.state.get(param, {}).items():
            yield name, field, value, param


@dataclass
class _Alone:
    """A tensor of one rank, in a form that says nothing about rows: a subclass's inner tensors.

    Fields:
        kind: the subclass, or None.
        inner, context: of `__tensor_flatten__`, copied to the CPU.
        local: shape and stride.
        whole: shape of the whole tensor, if it is sharded.
    """

    kind: Any
    inner: dict[str, Tensor]
    context: Any
    local: tuple[torch.Size, tuple[int, ...]]
    whole: tuple[int, ...] | None

    @classmethod
    def of(cls, value: Tensor) -> _Alone:
        part = local_part(value)
        whole = tuple(value.shape) if isinstance(value, DTensor) else None
        local = (part.shape, part.stride())
        if type(part) is Tensor:
            return cls(None, {"": part.to("cpu", copy=True)}, None, local, whole)
        names, context = part.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(part, name).to("cpu", copy=True) for name in names}
        return cls(type(part), inner, context, local, whole)

    def like(self, param: Tensor) -> Tensor:
        """The tensor, where `param` is, and sharded if it was."""
        inner = {name: tensor.to(param.device) for name, tensor in self.inner.items()}
        part = inner.get("")
        if self.kind is not None:
            part = self.kind.__tensor_unflatten__(inner, self.context, *self.local)
        assert part is not None
        if self.whole is None or not isinstance(param, DTensor):
            return part
        return sharded(part, param.device_mesh, param.placements, self.whole)


def _spread(value: Tensor, param: Tensor) -> bool | None:
    """Whether ranks hold rows of `value` as of `param` (True) or each all of it (False); None
    where another number of ranks could not read it."""
    if type(local_part(value)) is not Tensor:
        return None  # 8-bit states: blocks that do not end where rows do
    if isinstance(value, DTensor):
        alike = isinstance(param, DTensor) and value.placements == param.placements
        return True if alike else None
    if value.dim() == 0:
        return False
    return None if isinstance(param, DTensor) else value.size(0) == param.size(0)


def _as(rows: Tensor, param: Tensor | None) -> Tensor:
    """A copy of this rank's rows of something, where `param` is, and sharded if that is."""
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
    for name, fields in states.items():  # torch has cast them to the parameters' dtype
        for field, value in fields.items():
            loaded = optimizer.state[params[name]][field]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[params[name]][field] = value.to(loaded.device)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def _of_rank(rank: int) -> str:
    return f"rank_{rank}"


def _load(folder: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """Fills tensors in place, and returns all."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = dcp.FileSystemReader(folder)
    dcp.load(entries, storage_reader=reader, planner=planner, no_dist=True)
    return entries
