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

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.tensor_subclasses.kernels.dry_run import Way

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BLOCK = 1 << 20


def in_host_memory(tensor: Tensor) -> Tensor:
    """Tells a dry run that `tensor` lies in host memory, whatever its device; returns it."""
    if dry_run.current is not None:
        dry_run.current.in_host_memory(tensor)
    return tensor


def moved(way: Way, size: int) -> None:
    """Tells a dry run that `size` bytes are copied in the given direction."""
    if dry_run.current is not None:
        dry_run.current.moved(way, size)


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
