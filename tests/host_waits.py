"""Operations of PyTorch that make the host wait for a GPU: it reads a result or needs its size."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
SIZED_BY_NUMBERS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal}
SIZED_BY_NUMBERS |= {aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.bincount}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def waits_for(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for an operation that a `TorchDispatchMode` is handed."""
    packet = func.overloadpacket
    indices = args[1] if packet in INDEXED else ()
    by_mask = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)
    repeats = packet is aten.repeat_interleave and (kwargs or {}).get("output_size") is None
    return packet in SIZED_BY_NUMBERS or by_mask or repeats
