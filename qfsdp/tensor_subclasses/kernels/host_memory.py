"""Memory of the host as a store for what the accelerator does not hold, and the way there.

Pinned where there is an accelerator, so that copies run beside the computation. Where the CPU
itself computes the same calls make ordinary memory and real copies, so everything that offloads can
be tried without an accelerator. A dry run (`qfsdp.memory`), whose tensors all are fake ones of the
CPU, learns from here which of them would lie in host memory and what would be moved.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BLOCK = 1 << 20

Way = Literal["to_device", "to_host", "from_disk"]


class Observer(Protocol):
    """What a dry run wants to be told."""

    def in_host_memory(self, tensor: Tensor) -> None:
        """`tensor`'s storage is host memory."""

    def moved(self, way: Way, size: int) -> None:
        """`size` bytes went that way."""


observer: Observer | None = None


def in_host_memory(tensor: Tensor) -> Tensor:
    """Says that `tensor` lies in host memory, whatever its device is called; returns it."""
    if observer is not None:
        observer.in_host_memory(tensor)
    return tensor


def moved(way: Way, size: int) -> None:
    """Says that `size` bytes went that way."""
    if observer is not None:
        observer.moved(way, size)


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unset host memory, pinned where there is an accelerator."""
    pin = torch.accelerator.is_available()
    return in_host_memory(torch.empty(*shape, dtype=dtype, pin_memory=pin))


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, in the current stream and not waited for."""
    held = host_empty(tensor.shape, tensor.dtype)
    moved("to_host", tensor.nbytes)
    return held.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, in the current stream and not waited for."""
    moved("to_device", tensor.nbytes)
    return tensor.to(device, non_blocking=True, copy=True)


def return_freed_memory() -> None:
    """Has the C library give large blocks back to the system as soon as they are freed.

    glibc by itself raises the size from which it does to that of the largest block freed so far,
    up to 32 MB, and its heaps fragment: 1500 MB were resident of which 320 were used, on a CPU with
    the base on disk. Fresh pages cost time, so this is for where memory is what counts.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BLOCK)
