"""Buffers of transformers' modules: those in files become parameters, others are computed.

A buffer that files hold (`layer_scalar`, a router's `e_score_correction_bias`) is frozen like a
weight: as a parameter it is loaded, sharded and checked like one. Others, such as the frequencies
of rotary positions, are computed on the rank's device by transformers' own `_init_weights`, as its
loader does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qfsdp.common.errors import UserError


def stored_buffers_as_parameters(hf: nn.Module) -> None:
    """Makes every buffer that files hold a frozen parameter of the same name; a single number is
    one of a single row."""
    for module in hf.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                rows = buffer.view(1) if buffer.dim() == 0 else buffer
                module.register_parameter(name, nn.Parameter(rows, requires_grad=False))


def check_buffers(hf: nn.Module, source: str) -> None:
    """Raises `UserError` for a module that keeps a tensor which is neither parameter nor buffer:
    nothing computes it on the rank's device. Also for a single number that is trained: it has no
    rows."""
    for name, param in hf.named_parameters():
        if param.dim() == 0:
            raise UserError(
                f"{source}: {type(hf).__name__} keeps a single number, {name}, which is not "
                "sharded; such a model is not trained"
            )
    for name, module in hf.named_modules():
        for field, value in vars(module).items():
            if isinstance(value, Tensor):
                raise UserError(
                    f"{source}: {type(hf).__name__} keeps a tensor, {name}.{field}, that is "
                    "neither a parameter nor a buffer; such a model is not trained"
                )


@torch.no_grad()
def compute_buffers(hf: nn.Module, source: str) -> None:
    """Computes every buffer that no file holds; the model must have storage. Raises UserError:
    transformers does not compute one of them."""
    for name, module, owner in list(_with_buffers(hf)):
        buffers = dict(module.named_buffers(recurse=False))
        for buffer in buffers.values():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
        for param in module.parameters(recurse=False):
            cast(Any, param)._is_hf_initialized = True  # left as it is
        owner._init_weights(module)
        if next(_unset(module), None) is not None:  # a module around it may compute them
            _init_around(hf, name, owner)
        if (field := next(_unset(module), None)) is not None:
            where = f"{name}.{field} of {type(hf).__name__}"
            raise UserError(f"{source}: transformers does not compute {where}")


def _unset(module: nn.Module) -> Iterator[str]:
    """Names of the buffers that hold NaN."""
    for field, buffer in module.named_buffers(recurse=False):
        known = isinstance(buffer, FakeTensor) or not buffer.is_floating_point()
        if not known and bool(buffer.isnan().any()):
            yield field


def _init_around(hf: nn.Module, name: str, owner: Any) -> None:
    """Calls `_init_weights` for the modules around `name`, which leaves all parameters."""
    for param in hf.parameters():
        cast(Any, param)._is_hf_initialized = True
    while name:
        name = name.rpartition(".")[0]
        owner._init_weights(hf.get_submodule(name))


def _with_buffers(hf: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, the model of transformers that it belongs to) of modules with buffers."""
    owners: dict[str, Any] = {}
    for name, module in hf.named_modules():
        if hasattr(module, "_init_weights"):
            owners[name] = module
        if any(True for _ in module.buffers(recurse=False)):
            owner = max((o for o in owners if o == "" or f"{name}.".startswith(f"{o}.")), key=len)
            yield name, module, owners[owner]
