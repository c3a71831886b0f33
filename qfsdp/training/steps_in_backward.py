"""Weights that are updated in backward, one after the other."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qfsdp.distributed.gradients import LARGE_NORM, USED_GRAD_NORM
from qfsdp.distributed.world import World
from qfsdp.tensor_subclasses.dtensor import local_part


class StepsInBackward(Optimizer):
    """Updates every parameter in backward as soon as its gradient exists, and frees the gradient.

    So the gradients of a model never exist together. With fp32 weights they are a quarter of what
    parameters, gradients and the two states of Adam take. It needs a step of one backward pass and
    no clipping, which would need all gradients first. The norm of each gradient is kept
    (`qfsdp.distributed.gradients.USED_GRAD_NORM`).

    Groups, state and checkpoints are those of `optimizer`; `step` and `zero_grad` at the end of a
    training step do nothing.

    Args:
        optimizer: one that updates a parameter from its own gradient and state alone.

    Attributes:
        grad_norms: parameter -> norm of this rank's rows of its last gradient, fp32 `[]`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.grad_norms: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                # FSDP2 calls these hooks of a sharded parameter once its gradient is reduced.
                param.register_post_accumulate_grad_hook(self._update)

    def may_begin(self, loss: Tensor, world: World) -> bool:
        """Whether backward may update weights: the loss of no rank is NaN or infinite. To know it,
        the host waits for the loss."""
        self.grad_norms.clear()
        return math.isfinite(world.sum_of(loss.detach().double()).item())

    @torch.no_grad()
    def _update(self, param: Tensor) -> None:
        assert param.grad is not None
        rows = local_part(param.grad)
        if rows.numel() > LARGE_NORM:
            rows = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
        norm = torch.linalg.vector_norm(rows, dtype=torch.float32)
        setattr(param, USED_GRAD_NORM, norm)
        self.grad_norms[param] = norm
        groups = self._optimizer.param_groups
        group = next(group for group in groups if any(param is p for p in group["params"]))
        every, group["params"] = group["params"], [param]
        self._optimizer.param_groups = [group]
        try:
            self._optimizer.step()
        finally:
            group["params"], self._optimizer.param_groups = every, groups
        param.grad = None

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: backward has updated the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: backward has freed the gradients."""
