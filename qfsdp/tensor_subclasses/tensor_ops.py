"""The aten operations that FSDP2, nn.Module and DTensor call on a quantized weight, and no others.

Each is the same operation on the rows of bytes. `QuantizedTensor` refuses every other operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

aten = torch.ops.aten

OPS: dict[Any, Callable[..., Any]] = {}
"""aten operation -> handler `(self, args, kwargs) -> result`; args exclude the tensor itself."""


@dataclass
class RowPosition:
    """Index of a tensor's first row in the whole weight; `known` is False until `copy_` sets it."""

    row_offset: int
    known: bool = True


def _implements(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the handler of `ops`."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        OPS.update(dict.fromkeys(ops, handler))
        return handler

    return register


@_implements(aten.detach.default, aten.alias.default)
def _alias(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    return self._like(self.qdata)


@_implements(aten.clone.default)
def _clone(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    return self._like(self.qdata.clone(), metadata=[e.clone() for e in self.metadata])


@_implements(aten._to_copy.default)
def _to(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """Moves the bytes. A new dtype changes `dtype` only, the bytes stay as they are."""
    dtype = kwargs.get("dtype") or self.dtype
    where = {k: kwargs[k] for k in ("device", "non_blocking") if kwargs.get(k) is not None}
    qdata = self.qdata.to(copy=True, **where)
    return self._like(
        qdata, metadata=[e.to(copy=True, **where) for e in self.metadata], dtype=dtype
    )


@_implements(aten.empty_like.default)
def _empty_like(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    device = torch.device(kwargs.get("device") or self.device)
    metadata = [torch.empty_like(e, device=device) for e in self.metadata]
    if self.store is not None and device.type != "meta":
        return self._like(self.store.empty(self.qdata.shape), metadata=metadata, device=device)
    return self._like(torch.empty_like(self.qdata, device=device), metadata=metadata, device=device)


@_implements(aten.new_zeros.default, aten.new_empty.default)
def _new_rows(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """Rows for a (padded) shard of the same weight; `copy_` sets the row offset."""
    shape = (args[0][0], self.qdata.size(1))
    if self.store is not None and self.device.type != "meta":
        qdata = self.store.empty(shape)
    else:
        qdata = self.qdata.new_zeros(*shape, device=kwargs.get("device"))
    return self._like(qdata, position=RowPosition(self.row_offset, known=False))


@_implements(aten.split.Tensor)
def _split(self: QuantizedTensor, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    rows, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim != 0:
        raise NotImplementedError(f"{type(self).__name__}: aten.split on dim {dim}; rows only")
    starts = range(0, self.qdata.size(0), rows)
    return [
        self._like(p, position=RowPosition(self.row_offset + start))
        for start, p in zip(starts, self.qdata.split(rows), strict=True)
    ]


@_implements(aten.slice.Tensor)
def _slice(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    given = tuple(args)
    dim, start, end, step = given + (0, None, None, 1)[len(given) :]
    if dim != 0 or step != 1:
        raise NotImplementedError(
            f"{type(self).__name__}: aten.slice on dim {dim}, step {step}; contiguous rows only"
        )
    rows = range(self.qdata.size(0))[start:end]
    qdata = self.qdata[rows.start : max(rows.start, rows.stop)]
    position = RowPosition(self.row_offset + rows.start) if rows.start else self.position
    return self._like(qdata, position=position)


@_implements(aten.as_strided.default)
def _as_strided(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """Only strides that `view` gives: contiguous rows from the first on."""
    size, stride, offset = args[0], args[1], (args[2] if len(args) > 2 else 0) or 0
    if offset or list(stride) != list(torch.empty(size, device="meta").stride()):
        raise NotImplementedError(
            f"{type(self).__name__}: aten.as_strided to {list(size)}, {list(stride)}, {offset}"
        )
    return _view(self, (size,), {})


@_implements(aten.view.default)
def _view(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """The same rows, also flattened: FSDP2 keeps a flat alias of every shard."""
    size = list(args[0])
    if size == [-1] or size == [self.numel()]:
        return self._like(self.qdata, shape=[self.numel()])
    if size != list(self.shape):
        raise NotImplementedError(f"{type(self).__name__}: view of {list(self.shape)} as {size}")
    return self._like(self.qdata)


@_implements(aten.copy_.default)
def _copy_(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    source = args[0]
    same = type(source) is type(self) and source.qdata.shape == self.qdata.shape
    if not same or (self.position.known and source.row_offset != self.row_offset):
        raise NotImplementedError(
            f"aten.copy_ from {type(source).__name__}{list(source.shape)} into {self!r}: "
            "only the same rows in the same format can be copied; quantize first"
        )
    if 0 not in self.qdata.stride():  # rows that stay in a file have no memory
        self.qdata.copy_(source.qdata)
    for mine, theirs in zip(self.metadata, source.metadata, strict=True):
        if mine is not theirs:
            mine.copy_(theirs)
    if not self.position.known:
        self.position.row_offset, self.position.known = source.row_offset, True
    return self


@_implements(aten.is_pinned.default)
def _is_pinned(self: QuantizedTensor, args: Any, kwargs: Any) -> bool:
    return self.qdata.is_pinned()


@_implements(aten._pin_memory.default)
def _pin_memory(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    return self._like(self.qdata.pin_memory(), metadata=[e.pin_memory() for e in self.metadata])
