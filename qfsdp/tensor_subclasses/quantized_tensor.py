"""A quantized weight as rows of bytes: the base of every packed format.

Why one uint8 matrix. FSDP2 shards parameters by rows (dim 0) and moves them with
all-gather. If a row of the weight is a row of bytes that needs no other row to be read,
then sharding, padding, offloading, saving and slicing a quantized weight are the same
operations on a plain `uint8 [rows, row_bytes]` tensor, for any number of ranks:

    row of weights   w[0] w[1] ...                          cols numbers
    row of bytes     [ codes ............ | scales ... ]    row_bytes, format-specific

Other designs keep codes, scales and zeros as separate inner tensors and flatten them over
the whole weight. Their blocks then straddle ranks, so `numel` must divide by
`block * world_size`, and at a shard world size of 1 FSDP2 hands back only the first of the
inner tensors. Here neither can happen.

What does not fit in a row (NF4's second-level scales, 4 bytes per 16,384 weights) are
`extras`: small tensors for the whole weight, replicated on every rank and shared by all
shards and slices of it.

A shard must still know which rows of the whole it holds (`row_offset`, to find its
extras) and how many there are (`global_rows`, to undo padding). FSDP2 makes a shard so,
and does the last three steps once more on the local shard at its first forward:

    chunk = whole.split(rows)[rank]             knows its offset
    shard = whole.new_zeros(padded_rows, cols)  does not know yet
    shard.narrow(0, 0, n).copy_(chunk)          only the alias meets the chunk
    shard.narrow(0, 0, n)                       what is kept

So an offset lives in a `_Place` that a tensor shares with its slices from row 0 on, and
`copy_` into rows made by `new_zeros` settles it for all of them.

The bytes need not lie where the weight computes: with a `Store` they are in host memory or in a
file, and come to the device when FSDP2 asks for them (`fsdp_pre_all_gather`), which it does ahead
of their use and in a stream of its own. What it gathers is an ordinary packed weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

FORMATS: dict[str, type[QuantizedTensor]] = {}
"""Packed formats by their name in configs ("nf4"); filled as the classes are defined."""

GatherRows = Callable[[Tensor], Tensor]
"""Turns this rank's rows of a matrix into the rows of all ranks, in order."""

_OPS: dict[Any, Callable[..., Any]] = {}


def _implements(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a handler `(self, args, kwargs) -> result`; args exclude the tensor itself."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        _OPS.update(dict.fromkeys(ops, handler))
        return handler

    return register


class Store(Protocol):
    """Where the bytes of an offloaded weight lie (`qfsdp.distributed.stores`)."""

    def empty(self, shape: Sequence[int]) -> Tensor:
        """What is `packed` of a tensor with so many rows and bytes per row: unset."""

    def fetch(self, weight: QuantizedTensor) -> Tensor:
        """The rows that `weight` holds, on `weight.device`, uint8 `[rows, row_bytes]`."""


@dataclass
class _Place:
    """Where a tensor's first row is in the whole weight; `settled` once its rows have come."""

    row_offset: int
    settled: bool = True


class QuantizedTensor(torch.Tensor):
    """A frozen `[rows, cols]` weight stored as bytes; subclasses define the format.

    Fields:
        packed: uint8 `[rows, row_bytes]`, the rows that this tensor holds.
        extras: small tensors of the whole weight; attributes by their `metadata_names`.
        place: which rows those are.
        global_rows: number of rows of the whole weight.
        store: where the bytes are, if not on the device; `packed` then belongs to the store.

    `dtype` is the compute dtype that the weight stands for, not that of its storage; `device` is
    where it computes, and its extras are.
    """

    format: ClassVar[str]
    metadata_names: ClassVar[tuple[str, ...]] = ()

    qdata: Tensor
    place: _Place
    global_rows: int
    store: Store | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        FORMATS[cls.format] = cls

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        dtype: torch.dtype,
        place: _Place | None = None,
        global_rows: int | None = None,
        shape: Sequence[int] | None = None,
        store: Store | None = None,
        device: torch.device | None = None,
    ) -> QuantizedTensor:
        size = (qdata.size(0), cols) if shape is None else tuple(shape)
        if device is None or store is None:
            device = qdata.device
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        self.qdata, self.store = qdata, store
        # Attributes of their own, as dynamo follows inner tensors by name only.
        for name, entry in zip(cls.metadata_names, metadata, strict=True):
            setattr(self, name, entry)
        self.place = place or _Place(0)
        self.global_rows = qdata.size(0) if global_rows is None else global_rows
        return self

    # ---- what a format defines -------------------------------------------------------

    @staticmethod
    def row_bytes(cols: int) -> int:
        """Bytes that one row of `cols` weights takes."""
        raise NotImplementedError

    @staticmethod
    def metadata_shapes(rows: int, cols: int) -> list[tuple[int, ...]]:
        """Shapes (fp32) of the extras of a whole `[rows, cols]` weight."""
        raise NotImplementedError

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Bytes `[n, row_bytes]` of the rows from `row_offset` on -> weights `[n, cols]`.

        `row_scale` (fp32 `[n]`) multiplies each row before it is rounded to `dtype`; the result
        is written to `out` (contiguous, of `dtype`), where it is given.
        """
        raise NotImplementedError

    def quantize_(
        self,
        weight: Tensor | Iterable[Tensor],
        name: str = "weight",
        gather_rows: GatherRows | None = None,
    ) -> None:
        """Quantizes the rows that this tensor holds; writes its bytes and extras in place.

        Args:
            weight: those rows, `[self.size(0), cols]`, floating point, whole or in consecutive
                pieces (at least one); they are quantized on the device on which they are.
            name: named in errors.
            gather_rows: needed on a shard. Every rank calls `quantize_` with its own rows.

        Raises:
            ValueError: the weight holds NaN or infinity.
        """
        raise NotImplementedError

    # ---- what every format shares ----------------------------------------------------

    @classmethod
    def empty(
        cls, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedTensor:
        """A whole weight with unset bytes, to be sharded and filled later."""
        qdata = torch.empty(rows, cls.row_bytes(cols), dtype=torch.uint8, device=device)
        metadata = [torch.empty(s, device=device) for s in cls.metadata_shapes(rows, cols)]
        return cls(qdata, metadata, cols, dtype)

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """The extras in the order of `metadata_names`."""
        return tuple(getattr(self, name) for name in self.metadata_names)

    @property
    def row_offset(self) -> int:
        """Index of the first held row in the whole weight."""
        return self.place.row_offset

    @property
    def cols(self) -> int:
        """Weights per row."""
        return self.size(-1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The held rows as a plain `[rows, cols]` tensor of `dtype` (default: `self.dtype`)."""
        return self.dequantize_rows(
            self.fetch().qdata, self.metadata, self.cols, self.row_offset, dtype or self.dtype
        )

    def fetch(self) -> QuantizedTensor:
        """The same rows with their bytes on the device: itself, if they are there."""
        return self if self.store is None else self._like(self.store.fetch(self), store=None)

    def keep_in(self, store: Store) -> QuantizedTensor:
        """The same weight of the meta device; given storage, its bytes will be in `store`."""
        return self._like(self.qdata, store=store)

    def _like(self, qdata: Tensor, **changes: Any) -> QuantizedTensor:
        """Other bytes with this tensor's extras and place in the whole weight."""
        fields: dict[str, Any] = {
            "metadata": self.metadata,
            "cols": self.cols,
            "dtype": self.dtype,
            "place": self.place,
            "global_rows": self.global_rows,
            "store": self.store,
            "device": self.device,
        }
        return type(self)(qdata, **(fields | changes))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        last = self.row_offset + self.qdata.size(0)
        return (
            f"{type(self).__name__}(rows {self.row_offset}:{last} of {self.global_rows}, "
            f"cols={self.cols}, dtype={self.dtype}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ["qdata", *self.metadata_names]
        return names, (self.cols, self.dtype, self.row_offset, self.global_rows)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> QuantizedTensor:
        cols, dtype, row_offset, global_rows = context
        metadata = [inner[name] for name in cls.metadata_names]
        return cls(inner["qdata"], metadata, cols, dtype, _Place(row_offset), global_rows)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph may depend on, for the caches of `torch.compile`."""
        inner = [(tuple(t.shape), t.dtype) for t in (self.qdata, *self.metadata)]
        facts = (self.format, self.device, self.requires_grad, self.__tensor_flatten__()[1], inner)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        handler = _OPS.get(func)
        if handler is None or not isinstance(args[0], QuantizedTensor):
            raise NotImplementedError(
                f"{cls.__name__} does not implement {func}; a packed weight is frozen bytes: "
                "call .dequantize() for numbers, or qfsdp's `linear` to multiply by it"
            )
        return handler(args[0], args[1:], kwargs or {})

    # ---- FSDP2 -----------------------------------------------------------------------
    # The one-argument form of fsdp_pre_all_gather. With the five-argument form FSDP2 checks
    # that a padded rank's input has exactly the padded *logical* size, which bytes cannot.

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's bytes, padded to the rows that every rank contributes."""
        rows_per_rank = -(-self.global_rows // mesh.size())
        qdata = self.fetch().qdata
        if missing := rows_per_rank - qdata.size(0):
            qdata = F.pad(qdata, (0, 0, 0, missing))
        return (qdata.contiguous(),), self.metadata

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor, ...],
        param_dtype: torch.dtype,
        *,
        out: QuantizedTensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """The gathered bytes, without the padding, as the whole weight.

        No inner tensor is reported for FSDP2 to free: the weight is a view of the all-gather
        output, whose storage FSDP2 frees and refills itself. A view reported here would have
        that storage shrunk to the size of the view.
        """
        if out is not None:
            return None  # `out` views the same storage, which has just been refilled
        qdata = all_gather_outputs[0][: self.global_rows]
        return self._like(qdata, metadata=metadata, place=_Place(0), store=None), ()


# ---- the operations that FSDP2, nn.Module and DTensor need, and no others ----------------


@_implements(aten.detach.default, aten.alias.default)
def _alias(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    return self._like(self.qdata)


@_implements(aten.clone.default)
def _clone(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    return self._like(self.qdata.clone(), metadata=[e.clone() for e in self.metadata])


@_implements(aten._to_copy.default)
def _to(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """Moves the bytes; a new dtype changes only what the weight stands for."""
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
    """Rows for a (padded) shard of this very weight; which ones, `copy_` will say."""
    shape = (args[0][0], self.qdata.size(1))
    if self.store is not None and self.device.type != "meta":
        qdata = self.store.empty(shape)
    else:
        qdata = self.qdata.new_zeros(*shape, device=kwargs.get("device"))
    return self._like(qdata, place=_Place(self.row_offset, settled=False))


@_implements(aten.split.Tensor)
def _split(self: QuantizedTensor, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    rows, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim != 0:
        raise NotImplementedError(f"{type(self).__name__}: aten.split on dim {dim}; rows only")
    starts = range(0, self.qdata.size(0), rows)
    return [
        self._like(p, place=_Place(self.row_offset + start))
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
    place = _Place(self.row_offset + rows.start) if rows.start else self.place
    return self._like(qdata, place=place)


@_implements(aten.as_strided.default)
def _as_strided(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """What `view` gives, and no other strides: contiguous rows from the first on."""
    size, stride, offset = args[0], args[1], (args[2] if len(args) > 2 else 0) or 0
    if offset or list(stride) != list(torch.empty(size, device="meta").stride()):
        raise NotImplementedError(
            f"{type(self).__name__}: aten.as_strided to {list(size)}, {list(stride)}, {offset}"
        )
    return _view(self, (size,), {})


@_implements(aten.view.default)
def _view(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """The same rows; flattened too, as FSDP2 keeps a flat alias of every shard."""
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
    if not same or (self.place.settled and source.row_offset != self.row_offset):
        raise NotImplementedError(
            f"aten.copy_ from {type(source).__name__}{list(source.shape)} into {self!r}: "
            "only the same rows in the same format can be copied; quantize first"
        )
    if 0 not in self.qdata.stride():  # rows of a file take no memory, there is nothing to copy
        self.qdata.copy_(source.qdata)
    for mine, theirs in zip(self.metadata, source.metadata, strict=True):
        if mine is not theirs:
            mine.copy_(theirs)
    if not self.place.settled:
        self.place.row_offset, self.place.settled = source.row_offset, True
    return self


@_implements(aten.is_pinned.default)
def _is_pinned(self: QuantizedTensor, args: Any, kwargs: Any) -> bool:
    return self.qdata.is_pinned()


@_implements(aten._pin_memory.default)
def _pin_memory(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    return self._like(self.qdata.pin_memory(), metadata=[e.pin_memory() for e in self.metadata])
