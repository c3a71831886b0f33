"""Optimizer steps on this rank's rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from qfsdp.tensor_subclasses.dtensor import sharded


class LocalSteps:
    """Makes an optimizer step on this rank's rows as plain tensors; closures are not supported.

    An operation over hundreds of DTensors makes a spec for each of them, every time: a fused AdamW
    step on SmolLM2's adapters took 2.4 times as long as on their rows. Between steps parameters and
    state are DTensors over the same memory. State is updated in place, so its plain tensors are
    kept from step to step, as long as `optimizer.state` is the same object (`load_state_dict` makes
    a new one).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._state: Any = None  # optimizer.state between steps: DTensors
        self._plain: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)  # during steps: rows
        self._known = 0  # number of parameters whose state is in both
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []  # per group: parameters, rows
        optimizer.register_step_pre_hook(self._enter)
        optimizer.register_step_post_hook(self._leave)

    def _read_state(self, optimizer: Optimizer) -> None:
        self._state, self._plain = optimizer.state, defaultdict(dict)
        of_groups = [group["params"] for group in optimizer.param_groups]
        self._groups = [(params, [_rows(param) for param in params]) for params in of_groups]
        for param in (param for params in of_groups for param in params):
            if param in self._state:
                fields = self._state[param].items()
                self._plain[_rows(param)] = {name: _rows(value) for name, value in fields}
        self._known = len(self._plain)

    def _is_current(self, optimizer: Optimizer) -> bool:
        now = [group["params"] for group in optimizer.param_groups]
        return (
            self._state is optimizer.state
            and len(now) == len(self._groups)
            and all(params is known for params, (known, _) in zip(now, self._groups, strict=True))
            and all(mine is _rows(p) for g in self._groups for p, mine in zip(*g, strict=True))
        )

    @torch.no_grad()
    def _enter(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_current(optimizer):
            self._read_state(optimizer)
        for group, (params, rows) in zip(optimizer.param_groups, self._groups, strict=True):
            for param, mine in zip(params, rows, strict=True):
                if (grad := param.grad) is not None:
                    mine.grad = _rows(grad)
            group["params"] = rows
        optimizer.state = self._plain

    @torch.no_grad()
    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        optimizer.state = self._state
        for group, (params, rows) in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = params
            for param, mine in zip(params, rows, strict=True):
                if mine is not param:
                    mine.grad = None
        if len(self._plain) == self._known:
            return
        self._known = len(self._plain)
        for params, rows in self._groups:
            for param, mine in zip(params, rows, strict=True):
                if mine in self._plain and param not in self._state:
                    fields = self._plain[mine].items()
                    self._state[param] = {name: _sharded_like(param, v) for name, v in fields}


def _rows(value: Any) -> Any:
    """This rank's rows of a DTensor, other values as they are. `to_local` makes a view, in 3 us."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _sharded_like(param: Tensor, value: Any) -> Any:
    """`value` as a DTensor sharded like `param`, if it has the shape of this rank's rows."""
    if not isinstance(param, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != _rows(param).shape:
        return value
    return sharded(value, param.device_mesh, param.placements, param.shape)
