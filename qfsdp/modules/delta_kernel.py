"""The gated delta rule by flash-linear-attention, on GPUs that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def has_kernel(values: Tensor, package: str) -> bool:
    """Whether a package's kernel computes these values. PyTorch does in dry runs, which have fake
    tensors, and in fp32, which fla refuses."""
    if values.numel() >= 1 << 31:  # fla's 32-bit indices wrap, and its results are wrong (fla#1080)
        return False
    real = values.is_cuda and not isinstance(values, FakeTensor)
    refused = package == "fla" and values.dtype == torch.float32
    return real and not refused and is_installed(package)


@cache
def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def delta_kernel(values: Tensor) -> Kernel | None:
    """The kernel for tensors such as `values`; None: there is none, or they are compiled."""
    if torch.compiler.is_compiling() or not has_kernel(values, "fla"):
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kernel: Kernel = chunk_gated_delta_rule
    return kernel


def in_one_row(
    kernel: Kernel, parts: Sequence[Tensor], cu_seqlens: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `kernel`, which takes the borders of documents in one row, none of them empty.

    Args:
        parts: queries, keys, values, decays and steps, `[batch, tokens, heads, ...]`.
        cu_seqlens: as of `Batch`; None: each row is a document.
    """
    shape = parts[2].shape
    if cu_seqlens is not None:
        parts = [part.flatten(0, 1).unsqueeze(0) for part in parts]
        cu_seqlens = cu_seqlens.unique_consecutive()
    found, state = kernel(*parts, cu_seqlens=cu_seqlens, **more)
    return found.reshape(shape), state
