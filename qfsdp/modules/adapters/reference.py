"""The reference of preference losses: the same model, with the adapters of the run's start.

The base is frozen, so the reference shares its bytes. It differs by the adapters: they are off, or
those with which the run began. `keep_start` keeps these beside the trained ones, frozen and sharded
like them (fp32; 0.6 % of a base in 4 bits at rank 16 of an 8B model).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.adapted import AdaptedLinear, adapted_linears
from qfsdp.tensor_subclasses.dtensor import local_part

Reference = Literal["base", "start", "none"]
"""The adapters off, as they were when the run began, or no reference."""

ADAPTER_FIELDS = ("lora_A", "lora_B", "magnitude", "weight_norm", "ia3_l", "miss_block", "oft_R")


def keep_start(model: nn.Module, reference: Reference, config: AdapterConfig) -> None:
    """Adds frozen, unset parameters for the adapters' start where the reference needs them: with
    "start", unless the start is the base; and with a start that changes the base, always. Call it
    before the model is sharded; `set_start` fills them.

    Args:
        config: of the adapters.

    Raises:
        UserError: there is a reference, and whole modules or rows of tokens are trained.
    """
    for key in ("modules_to_save", "trainable_token_indices"):
        if reference != "none" and (value := getattr(config, key)) is not None:
            expected = f"expected null with reference: {reference}, as no copy of them is kept"
            raise UserError(f"adapter.{key}: {value}; {expected}")
    starts_otherwise = config.start_from is not None or config.init != "default"
    if not config.changes_base and not (reference == "start" and starts_otherwise):
        return
    for _, module in adapted_linears(model):
        for name, param in _fields(module):
            module.start[name] = nn.Parameter(torch.empty_like(param), requires_grad=False)


def keeps_start(model: nn.Module) -> bool:
    """Whether `keep_start` has been called."""
    return any(module.start for _, module in adapted_linears(model))


@torch.no_grad()
def set_start(model: nn.Module) -> None:
    """Copies the current adapters to where `keep_start` has made room, else does nothing."""
    for _, module in adapted_linears(model):
        for name, param in _fields(module) if module.start else ():
            local_part(module.start[name]).copy_(local_part(param))


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """A `with` block in which the model is the reference, in eval mode and without gradients.

    The passes have the same operations as those of training. So before the first update the numbers
    are the same, to the last bit, unless adapters have dropout.
    """
    trained, modules = model.training, [module for _, module in adapted_linears(model)]
    model.eval()
    for module in modules:
        module.is_reference = True
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(trained)
        for module in modules:
            module.is_reference = False


def _fields(module: AdaptedLinear) -> Iterator[tuple[str, nn.Parameter]]:
    for name in ADAPTER_FIELDS:
        if (param := getattr(module, name, None)) is not None:
            yield name, param
