"""Host memory for tensors that the accelerator does not hold, and copies to and from it.

Host memory is pinned if there is an accelerator, so that copies run during the computation. If the
CPU itself computes, the same calls allocate ordinary memory and copy, so offloading can be tried
without an accelerator. All tensors of a dry run are fake CPU tensors: these functions tell it which
of them are in host memory and what is copied (`dry_run`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from qfsdp.common.devices import accelerator
from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.tensor_subclasses.kernels.dry_run import Way

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BLOCK = 1 << 20
_LARGEST_PINNED = 1 << 30
_ALIGNED = 512  # bytes


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
    """Uninitialized host memory, pinned if there is an accelerator: see `pinned_size`."""
    pin = accelerator() is not None
    return in_host_memory(torch.empty(*shape, dtype=dtype, pin_memory=pin))


def pinned_size(size: int) -> int:
    """What PyTorch takes for pinned memory of `size` bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


class HostBlocks:
    """Host memory for tensors that stay. Pinned ones share blocks whose sizes are powers of two.

    Alone, those of a 4-bit Llama-3-70B take 1.25 times their bytes, on 3 ranks 1.6 times; in blocks
    at most 1.01 times (`tests/distributed/test_stores.py`). A dry run counts their bytes.

    Attributes:
        expected: bytes that will be taken, about: blocks are not larger than what is left of it.
    """

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected
        self._unused: list[Tensor] = []  # the end of every block

    def take(self, size: int) -> Tensor:
        """uint8 `[size]`, uninitialized, which no other call gets."""
        if accelerator() is None or dry_run.current is not None or not size:
            return in_host_memory(torch.empty(size, dtype=torch.uint8))
        whole = -(-size // _ALIGNED) * _ALIGNED
        fitting = [rest for rest in self._unused if rest.numel() >= whole]
        rest = min(fitting, key=Tensor.numel, default=None)
        if rest is None:
            share = min(max(self.expected, 1), _LARGEST_PINNED)
            length = max(pinned_size(whole), 1 << (share.bit_length() - 1))
            rest = torch.empty(length, dtype=torch.uint8, pin_memory=True)
        self._unused = [one for one in self._unused if one is not rest] + [rest[whole:]]
        self.expected -= whole
        return rest[:size]


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, enqueued in the current stream."""
    held = host_empty(tensor.shape, tensor.dtype)
    moved("to_host", tensor.nbytes)
    return held.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, enqueued in the current stream."""
    moved("to_device", tensor.nbytes)
    return tensor.to(device, non_blocking=True, copy=True)


def return_freed_memory() -> None:
    """Makes glibc return large blocks to the system as soon as they are freed.

    By default glibc raises the size from which it does so to that of the largest block freed so
    far, up to 32 MB, and its heap fragments. With a quantized base of 1,395 MB on disk and a CPU
    that computes (`benchmarks/offload_tiers.py`), 2,750 MB were resident in a train step, and 471
    with this setting. It costs time, because pages are mapped again: 105 s of CPU time instead of
    80 for three steps. So it is for runs that offload the base.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BLOCK)
