"""The aten operations that FSDP2, nn.Module and DTensor call on a quantized weight, and no others.

Each is the same operation on the rows of bytes. `QuantizedTensor` refuses every other operation,
and those below refuse arguments for which rows of bytes have no right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

aten = torch.ops.aten

OPS: dict[Any, Callable[..., Any]] = {}
"""aten operation -> handler `(self, args, kwargs) -> result`; args exclude the tensor itself."""


@dataclass
class RowPosition:
    """Where the memory of a tensor lies in the whole weight; shared with its slices from row 0 on.

    Fields:
        row_offset: index of its first row in the whole weight.
        known: False for rows that `new_zeros` made, until `copy_` fills them.
        rows: number of rows of this memory that belong to the weight. Its metadata is of them all,
            so that only a tensor which holds them all may replace it. None: all rows of the first
            tensor with this position.
        parts: into how many parts of equal size the rows of the whole weight are divided; FSDP2
            gathers one of them (`qfsdp.distributed.expert_parallel`).
    """

    row_offset: int
    known: bool = True
    rows: int | None = None
    parts: int = 1


def refused(cls: type, what: str) -> NotImplementedError:
    """The error for an operation that quantized weights of this class do not have."""
    return NotImplementedError(
        f"{cls.__name__} does not implement {what}; a quantized weight is frozen bytes: "
        "call .dequantize() for numbers, or qfsdp's `linear` to multiply by it"
    )


def implements(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the handler of `ops`."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        OPS.update(dict.fromkeys(ops, handler))
        return handler

    return register


@implements(aten.clone.default)
def _clone(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    metadata = [entry.clone() for entry in self.metadata]
    return self._like(self.qdata.clone(), metadata=metadata, position=self.own_position())


@implements(aten._to_copy.default)
def _to(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """Moves the bytes. A new dtype changes `dtype` only, the bytes stay as they are."""
    dtype = self.asked_dtype(kwargs, "aten._to_copy")
    where = {k: kwargs[k] for k in ("device", "non_blocking") if kwargs.get(k) is not None}
    qdata, *metadata = (t.to(copy=True, **where) for t in (self.qdata, *self.metadata))
    return self._like(qdata, metadata=metadata, dtype=dtype, position=self.own_position())


@implements(aten.new_zeros.default, aten.new_empty.default)
def _new_rows(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """Rows for a (padded) shard of the same weight. They hold no weights: `copy_` fills them and
    sets the row offset. FSDP2 asks for `[0]` where a rank has no rows."""
    shape = list(args[0])
    if shape != [0] and shape[1:] != [self.cols]:
        what = f"aten.new_zeros and aten.new_empty of {shape}, only [n, {self.cols}]"
        raise refused(type(self), what)
    dtype = self.asked_dtype(kwargs, "aten.new_zeros")
    device = torch.device(kwargs.get("device") or self.device)
    bytes_shape = (shape[0], self.qdata.size(1))
    if self.store is not None and device.type != "meta":
        qdata = self.store.empty(bytes_shape)
    else:
        qdata = self.qdata.new_zeros(bytes_shape, device=device)
    return self._like(
        qdata,
        metadata=[entry.to(device, copy=True) for entry in self.metadata],
        dtype=dtype,
        position=replace(self.position, known=False, rows=None),
        shape=shape if shape == [0] else None,
        device=device,
    )


@implements(aten.split.Tensor)
def _split(self: QuantizedTensor, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    rows, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim not in (0, -2) or self.dim() != 2:
        raise refused(type(self), f"aten.split on dim {dim}, only of rows")
    starts = range(0, self.qdata.size(0), rows) or [0]
    parts = self.qdata.split(rows)
    return [self._rows(part, start) for start, part in zip(starts, parts, strict=True)]


@implements(aten.slice.Tensor)
def _slice(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    given = tuple(args)
    dim, start, end, step = given + (0, None, None, 1)[len(given) :]
    if dim not in (0, -2) or step != 1 or self.dim() != 2:
        raise refused(type(self), f"aten.slice on dim {dim}, step {step}, only of contiguous rows")
    rows = range(self.qdata.size(0))[start:end]
    return self._rows(self.qdata[rows.start : max(rows.start, rows.stop)], rows.start)


@implements(aten.copy_.default)
def _copy_(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    source = args[0]
    if difference := _difference(self, source):
        raise NotImplementedError(
            f"aten.copy_ from {type(source).__name__}{list(source.shape)} into {self!r}: "
            f"{difference}; expected the same rows in the same format. `quantize_` writes numbers "
            "to a quantized weight, .dequantize() gives its numbers"
        )
    if 0 not in self.qdata.stride():  # rows that stay in a file have no memory
        self.qdata.copy_(source.qdata)
    for mine, theirs in zip(self.metadata, source.metadata, strict=True):
        if mine is not theirs:
            mine.copy_(theirs)
    if not self.position.known:
        self.position.row_offset, self.position.known = source.row_offset, True
        self.position.rows = self.qdata.size(0)
    return self


def _difference(self: QuantizedTensor, source: Any) -> str:
    """Why the rows of `source` cannot be copied into `self`; "" if they can."""
    if type(source) is not type(self):
        return "another format"
    if (source.shape, source.cols, source.dtype) != (self.shape, self.cols, self.dtype):
        return f"{source!r} has another shape or dtype"
    if source.qdata.shape != self.qdata.shape:
        return "rows of another number of bytes"
    if source.global_rows != self.global_rows:
        return f"rows of a weight with {source.global_rows} rows"
    source.check_filled()
    if not self.position.known:
        return ""
    if source.row_offset != self.row_offset:
        return f"{source!r} holds other rows"
    # Metadata is of all rows, so it cannot be replaced for some of them.
    shared = self.position.rows != self.qdata.size(0) and not self.is_meta
    pairs = zip(self.metadata, source.metadata, strict=True)
    if shared and not all(mine is theirs or mine.equal(theirs) for mine, theirs in pairs):
        return "other rows share its scales, and those of the source differ; copy the whole weight"
    return ""


@implements(aten.is_pinned.default)
def _is_pinned(self: QuantizedTensor, args: Any, kwargs: Any) -> bool:
    return self.qdata.is_pinned()


@implements(aten._pin_memory.default)
def _pin_memory(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    qdata, *metadata = (t.pin_memory() for t in (self.qdata, *self.metadata))
    return self._like(qdata, metadata=metadata, position=self.own_position())
