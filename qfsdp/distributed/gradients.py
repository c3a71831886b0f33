"""Which parameters have gradients, and when these are reduced; `training.steps` clips them."""

from __future__ import annotations

from typing import Any

from torch import nn

from qfsdp.distributed.strategy import ShardingConfig

# Unsharded gradients that "auto" accepts, fp32: rank 16 of a 70B model has 0.8 GB, rank 64 3.3 GB.
SMALL_GRADIENTS = 1 << 30
# Attribute of a model whose gradients are reduced once per update: whether it is the time.
REDUCES_NOW = "_reduces_now"
# Attribute of a parameter whose gradient was used in backward: its norm on this rank, fp32.
USED_GRAD_NORM = "_used_grad_norm"
# Numbers of a gradient whose norm is taken of its rows first. On CPUs PyTorch adds square after
# square in fp32: the norm of 28 million was 0.16 % too small, and so depended on the ranks.
LARGE_NORM = 1 << 16


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer updates, in model order."""
    return [p for p in model.parameters() if p.requires_grad]


def reduces_every_update(model: nn.Module, config: ShardingConfig) -> bool:
    """Whether gradients of `model` are reduced once per update, as `config` or their size says."""
    unsharded = 4 * sum(param.numel() for param in trainable_parameters(model))
    small = unsharded <= SMALL_GRADIENTS
    chosen = config.reduce_gradients
    return chosen == "every_update" or (chosen == "auto" and small)


def __getattr__(name: str) -> Any:  # clipping, which an update does, is in `training.steps`
    from qfsdp.common.moved import name_that_left

    return name_that_left(__name__, name)
