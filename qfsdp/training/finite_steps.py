"""An update with NaN or infinity in its loss, gradients or learning rate is left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

DECIDE = ("loss", "grad_norm", "lr")


def start_reading(loss: Tensor, grad_norm: Tensor, lr: float) -> Callable[[], dict[str, float]]:
    """Starts to copy the loss and the gradient norm of an update to the host.

    Args:
        loss, grad_norm: of all ranks, `[]`.

    Returns:
        A function that waits for the copy, and for nothing that the device is given after it; it
        returns `loss`, `grad_norm` and `lr`, the same on every rank.
    """
    copy = torch.stack([loss.double(), grad_norm.to(loss.device).double()])
    ended = None
    if copy.device.type != "cpu":
        copy, ended = copy.to("cpu", non_blocking=True), torch.Event(copy.device)
        ended.record()

    @functools.cache
    def read() -> dict[str, float]:
        if ended is not None:
            ended.synchronize()
        numbers = copy.tolist()
        return {"loss": numbers[0], "grad_norm": numbers[1], "lr": lr}

    return read


def step_if_finite(
    optimizer: Optimizer, loss: Tensor, grad_norm: Tensor
) -> Callable[[], dict[str, float]]:
    """`optimizer.step()`, unless the loss, the gradient norm or the learning rate is not finite.

    PyTorch's fused optimizers decide on the device (`found_inf`, as `torch.amp.GradScaler` tells
    them). For others the host waits for the two numbers first.

    Args:
        loss, grad_norm: of all ranks, `[]`.

    Returns:
        As of `start_reading`.
    """
    lr = float(optimizer.param_groups[0]["lr"])  # a tensor in some optimizers
    read = start_reading(loss, grad_norm, lr)
    if decides_on_device(optimizer, loss.device) and math.isfinite(lr):
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm.to(loss.device))
        told: Any = optimizer
        told.found_inf = (~finite).float()
        try:
            optimizer.step()
        finally:
            del told.found_inf
    elif are_finite(read()):
        optimizer.step()
    return read


def decides_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a tensor on `device` can tell the optimizer to leave an update out.

    Not if parameters lie in host memory: PyTorch copies the tensor to them without waiting, so the
    optimizer could read an old value.
    """
    groups = optimizer.param_groups
    fused = all(group.get("fused") for group in groups)
    beside = all(param.device == device for group in groups for param in group["params"])
    return fused and beside and getattr(optimizer, "_step_supports_amp_scaling", False)


def are_finite(metrics: Mapping[str, float]) -> bool:
    """Whether an update may be applied: its loss, gradient norm and learning rate are neither NaN
    nor infinite. Other metrics, as rewards, are only logged."""
    return all(math.isfinite(metrics[name]) for name in DECIDE)
