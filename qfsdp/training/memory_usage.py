"""Measures the memory of a run: its peak, and bytes by kind of tensor."""

from __future__ import annotations

import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from qfsdp.distributed.world import World
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

QUANTIZED, PLAIN = "parameters_quantized", "parameters_plain"
TRAINED = "parameters_trained"
GRADIENTS, OPTIMIZER = "gradients", "optimizer_state"
IN_HOST = "_in_host"  # suffix of a kind whose tensors are in host memory, in a run on GPUs


# ---- peaks ---------------------------------------------------------------------------------


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory of this process since `reset_peak_memory`: allocated on its accelerator, or
    resident if it computes on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Sets the peak to the current memory; does nothing if the system does not allow it."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# ---- kinds ---------------------------------------------------------------------------------


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside `tensor`: local rows of a DTensor, bytes and metadata of a quantized
    weight, codes and scales of an 8-bit optimizer state, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # a DTensor's mesh is not
            yield from plain_tensors(part)


def bytes_by_kind(
    model: nn.Module, optimizer: Optimizer | None, device: torch.device
) -> dict[str, int]:
    """Bytes of this rank between steps, by kind; every storage counts once.

    Kinds are the constants of this module, with the suffix `IN_HOST` for tensors in host memory if
    `device` is an accelerator. Empty kinds are left out.
    """
    kinds: list[tuple[str, Tensor]] = [(_kind(param), param) for param in model.parameters()]
    kinds += [(GRADIENTS, p.grad) for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        state = tree_leaves(list(optimizer.state.values()))
        kinds += [(OPTIMIZER, value) for value in state if isinstance(value, Tensor)]
    held: Counter[str] = Counter()
    counted = set()
    for kind, tensor in kinds:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                elsewhere = plain.device.type != device.type
                held[kind + IN_HOST * elsewhere] += storage.nbytes()
    return {kind: size for kind, size in held.items() if size}


def _kind(param: Tensor) -> str:
    if param.requires_grad:
        return TRAINED
    return QUANTIZED if isinstance(local_part(param), QuantizedTensor) else PLAIN


class MemoryUsage:
    """Reads the memory of training steps; every rank makes one once the model is loaded.

    Args:
        optimizer: None if nothing is trained.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, world: World) -> None:
        self._model, self._optimizer, self._world = model, optimizer, world
        self._load_peak = peak_memory_bytes(world.device)  # 0: told already
        self._kinds: dict[str, float] = {}

    def reset(self) -> None:
        """Starts the peaks from the current memory."""
        reset_peak_memory(self._world.device)

    def numbers(self) -> list[float]:
        """Bytes of this rank: the peak since `reset`, taken from the device by PyTorch's allocator
        (0 on a CPU), and the peak of loading."""
        device, reserved = self._world.device, 0
        if device.type != "cpu":
            reserved = torch.accelerator.max_memory_reserved(device)
        return [peak_memory_bytes(device), reserved, self._load_peak]

    def read(self, of_ranks: list[list[float]]) -> dict[str, float]:
        """The peaks since `reset`, and a new `reset`.

        peak_memory_gib           of the rank that has the most (`peak_memory_bytes`)
        memory/peak_rank          that rank; the last of several
        memory/peak_reserved_gib  on accelerators: taken from the device by PyTorch's allocator
        memory/load_peak_gib      until training began; only in the first call
        memory/KIND_gib           of this rank, see `bytes_by_kind`; for gradients their size
                                  before the update, as there are none between steps

        Args:
            of_ranks: `numbers` of every rank, after a step.
        """
        peaks, reserved, load_peaks = of_ranks
        peak = max(peaks)
        last = len(peaks) - 1 - peaks[::-1].index(peak)
        metrics = {"peak_memory_gib": peak / 2**30, "memory/peak_rank": last}
        if self._world.device.type != "cpu":
            metrics["memory/peak_reserved_gib"] = max(reserved) / 2**30
        if self._load_peak:
            metrics["memory/load_peak_gib"] = max(load_peaks) / 2**30
            self._load_peak = 0
        self.reset()
        return metrics | self._by_kind()

    def _by_kind(self) -> dict[str, float]:
        if not self._kinds:  # they do not change after the first step
            held = bytes_by_kind(self._model, self._optimizer, self._world.device)
            held |= {
                kind.replace(TRAINED, GRADIENTS): size
                for kind, size in held.items()
                if kind.startswith(TRAINED)
            }
            self._kinds = {f"memory/{kind}_gib": size / 2**30 for kind, size in held.items()}
        return self._kinds
