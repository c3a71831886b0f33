"""A 4-bit weight as rows of bytes: the base class of every quantized format.

Why one uint8 matrix. FSDP2 shards parameters by rows (dim 0) and moves them with all-gather. Here
a row of the weight is a row of bytes, and no other row is needed to read it. So sharding, padding,
offloading, saving and slicing a quantized weight are the same operations on a plain
`uint8 [rows, row_bytes]` tensor, for any number of ranks:

    row of weights   w[0] w[1] ...                          cols numbers
    row of bytes     [ codes ............ | scales ... ]    row_bytes, format-specific

Other designs keep codes, scales and zeros as separate inner tensors, flattened over the whole
weight. Their blocks then straddle ranks: `numel` must be divisible by `block * world_size`, and at
a shard world size of 1 FSDP2 hands back only the first inner tensor. Neither can happen here.

What does not fit in a row (NF4's second-level scales, 4 bytes per 16,384 weights) is `metadata`:
small tensors for the whole weight, replicated on every rank and shared by all shards and slices.

A shard must also know the index of its first row in the whole weight (`row_offset`, to find its
scales in the metadata) and how many rows the whole has (`global_rows`, to remove padding). FSDP2
makes a shard in these steps, and repeats the last three on the local shard at its first forward:

    chunk = whole.split(rows)[rank]             knows its row offset
    shard = whole.new_zeros(padded_rows, cols)  does not know it yet
    shard.narrow(0, 0, n).copy_(chunk)          only this alias gets the chunk
    shard.narrow(0, 0, n)                       is the result

So the offset lives in a `RowPosition` object that a tensor shares with its slices from row 0 on.
`copy_` into rows made by `new_zeros` sets it for all of them. Until then they hold no weights.

The bytes may be on another device than the weight. With a `ByteStore` they are in host memory or
in a file and are copied to the device when FSDP2 asks for them (`fsdp_pre_all_gather`): ahead of
their use and in its own stream. The gathered result is an ordinary quantized weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from qfsdp.tensor_subclasses import tensor_methods
from qfsdp.tensor_subclasses.tensor_ops import OPS, RowPosition, aten, implements, refused

FORMATS: dict[str, type[QuantizedTensor]] = tensor_methods.FORMATS
"""Quantized formats by their name in configs ("nf4"); every subclass adds itself."""

GatherRows = Callable[[Tensor], Tensor]
"""Collective: this rank's rows of a matrix -> the rows of all ranks, in order."""


class ByteStore(Protocol):
    """Holds the bytes of an offloaded weight (`qfsdp.distributed.stores`)."""

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Uninitialized `qdata` of `shape`, held by this store."""

    def fetch(self, weight: QuantizedTensor) -> Tensor:
        """The rows of `weight` on `weight.device`, uint8 `[rows, row_bytes]`."""


class QuantizedTensor(tensor_methods.TensorMethods):
    """A frozen `[rows, cols]` weight stored as bytes; subclasses define the format.

    Fields:
        qdata: uint8 `[rows, row_bytes]`, the rows that this tensor holds.
        metadata: small tensors of the whole weight; attributes named by `metadata_names`.
        position: where the held rows lie in the whole weight.
        global_rows: number of rows of the whole weight.
        store: holds `qdata`, if it is not on the device.

    `dtype` is the compute dtype of the weight, not the dtype of its storage. `device` is where the
    weight computes; its metadata is there too.
    """

    format: ClassVar[str]
    metadata_names: ClassVar[tuple[str, ...]] = ()

    qdata: Tensor
    position: RowPosition
    global_rows: int
    store: ByteStore | None
    _cols: int

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
        position: RowPosition | None = None,
        global_rows: int | None = None,
        shape: Sequence[int] | None = None,
        store: ByteStore | None = None,
        device: torch.device | None = None,
    ) -> QuantizedTensor:
        size = (qdata.size(0), cols) if shape is None else tuple(shape)
        if device is None or store is None:
            device = qdata.device
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        self.qdata, self.store, self._cols = qdata, store, cols
        # One attribute each: Dynamo finds inner tensors by name only.
        for name, entry in zip(cls.metadata_names, metadata, strict=True):
            setattr(self, name, entry)
        self.position = position or RowPosition(0)
        if self.position.rows is None:
            self.position.rows = qdata.size(0)
        self.global_rows = qdata.size(0) if global_rows is None else global_rows
        return self

    # ---- defined by each format ------------------------------------------------------

    @staticmethod
    def row_bytes(cols: int) -> int:
        """Bytes of one row of `cols` weights."""
        raise NotImplementedError

    @staticmethod
    def metadata_shapes(rows: int, cols: int) -> list[tuple[int, ...]]:
        """Shapes of the metadata (fp32) of a whole `[rows, cols]` weight; default: none."""
        return []

    @staticmethod
    def has_finite_scales(qdata: Tensor, cols: int) -> bool:
        """Whether no scale in these rows is a code for NaN; default: there is no such code."""
        return True

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
    ) -> Tensor:
        """Dequantizes the rows from `row_offset` of the whole weight on.

        Args:
            qdata: uint8 `[n, row_bytes]`, the bytes of these rows.
            metadata: of the whole weight.
            row_scale: fp32 `[n]`, multiplies each row before it is rounded to `dtype`.

        Returns:
            `[n, cols]` of `dtype`.
        """
        raise NotImplementedError

    def _quantize(
        self, pieces: Iterable[Tensor], name: str, gather_rows: GatherRows | None
    ) -> None:
        """`quantize_` for rows that have been checked, in consecutive pieces."""
        raise NotImplementedError

    # ---- shared by all formats -------------------------------------------------------

    @classmethod
    def empty(
        cls, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedTensor:
        """A whole weight with uninitialized bytes, to be sharded and filled later. Raises
        TypeError: `dtype` is not floating point."""
        if not dtype.is_floating_point:
            raise TypeError(f"{cls.__name__}: dtype {dtype}; expected floating point")
        qdata = torch.empty(rows, cls.row_bytes(cols), dtype=torch.uint8, device=device)
        metadata = [torch.empty(s, device=device) for s in cls.metadata_shapes(rows, cols)]
        return cls(qdata, metadata, cols, dtype)

    @property
    def metadata(self) -> tuple[Tensor, ...]:
        """The metadata tensors in the order of `metadata_names`."""
        return tuple(getattr(self, name) for name in self.metadata_names)

    @property
    def row_offset(self) -> int:
        """Index of the first held row in the whole weight."""
        return self.position.row_offset

    @property
    def cols(self) -> int:
        """Weights per row."""
        return self.size(-1) if self.dim() == 2 else self._cols

    def quantize_(
        self,
        weight: Tensor | Iterable[Tensor],
        name: str = "weight",
        gather_rows: GatherRows | None = None,
    ) -> None:
        """Quantizes the rows that this tensor holds; writes its bytes and metadata in place.

        Args:
            weight: these rows, floating point, as `[self.size(0), cols]` or in consecutive pieces
                (at least one). They are quantized on their own device.
            name: name of the weight in errors.
            gather_rows: needed on a shard. Every rank calls `quantize_` with its own rows.

        Raises:
            TypeError: the weight is not floating point.
            ValueError: the weight is empty, has another shape, or holds NaN or infinity; or this
                tensor holds only some rows, and `gather_rows` is missing.
        """
        if self.global_rows * self.cols == 0:
            raise ValueError(f"{name}: {list(self.shape)} has no numbers; it cannot be quantized")
        if gather_rows is None and self.qdata.size(0) != self.global_rows:
            raise ValueError(
                f"{name}: quantize_ of {self!r} without gather_rows; expected all rows, because "
                "scales depend on the rows of the whole weight"
            )
        self._quantize(self._checked_pieces(weight, name), name, gather_rows)

    def _checked_pieces(self, weight: Tensor | Iterable[Tensor], name: str) -> Iterator[Tensor]:
        """Yields the pieces of the held rows; raises for another shape or dtype."""
        rows = 0
        for piece in (weight,) if isinstance(weight, Tensor) else weight:
            if not piece.is_floating_point():
                raise TypeError(
                    f"{name}: {piece.dtype} cannot be quantized; expected floating point"
                )
            rows += piece.size(0) if piece.dim() else 0
            if piece.dim() != 2 or piece.size(1) != self.cols or rows > self.qdata.size(0):
                raise ValueError(
                    f"{name}: {list(piece.shape)} cannot be quantized into {self!r}; expected "
                    f"[{self.qdata.size(0)}, {self.cols}]"
                )
            yield piece
        if rows != self.qdata.size(0):
            raise ValueError(f"{name}: {rows} rows; expected {self.qdata.size(0)}")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The held rows as a plain tensor of this shape, of `dtype` (default: `self.dtype`). Raises
        ValueError: rows that `new_zeros` made have not been filled."""
        self.check_filled()
        rows = self.dequantize_rows(
            self.fetch().qdata, self.metadata, self.cols, self.row_offset, dtype or self.dtype
        )
        return rows if self.dim() == 2 else rows.flatten()

    def check_filled(self) -> None:
        """Raises ValueError for rows of `new_zeros` or `new_empty` that `copy_` has not filled."""
        if not self.position.known and self.qdata.size(0):
            raise ValueError(f"{self!r} holds no weights yet; expected copy_ from such rows first")

    def check_product(self) -> None:
        """Raises ValueError if a product with this weight would be wrong or lack its gradient."""
        self.check_filled()
        if self.dim() != 2 or self.requires_grad:
            raise ValueError(
                f"linear by {self!r} of {self.dim()} dimensions, requires_grad={self.requires_grad}"
                "; expected 2 and False: a quantized weight has no gradient"
            )

    def fetch(self) -> QuantizedTensor:
        """The same weight with its bytes on the device; `self` if they are there already."""
        if self.store is None:
            return self
        qdata = self.store.fetch(self)
        if qdata.shape != self.qdata.shape:  # a file is read as a whole
            raise refused(type(self), "reading some rows of a weight on disk")
        return self._like(qdata, store=None)

    def keep_in(self, store: ByteStore) -> QuantizedTensor:
        """The same weight, on the meta device; `to_empty` will put its bytes into `store`."""
        return self._like(self.qdata, store=store)

    def _like(self, qdata: Tensor, **changes: Any) -> QuantizedTensor:
        """A tensor with other bytes and the fields of this one, except for `changes`."""
        fields: dict[str, Any] = {
            "metadata": self.metadata,
            "cols": self.cols,
            "dtype": self.dtype,
            "position": self.position,
            "global_rows": self.global_rows,
            "store": self.store,
            "device": self.device,
            "shape": None if self.dim() == 2 else [qdata.size(0) * self.cols],
        }
        return type(self)(qdata, **(fields | changes))

    def _rows(self, qdata: Tensor, start: int) -> QuantizedTensor:
        """Consecutive rows of this tensor from row `start` on."""
        position = self.position
        if start:
            position = replace(position, row_offset=position.row_offset + start)
        return self._like(qdata, position=position)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        last = self.row_offset + self.qdata.size(0)
        return (
            f"{type(self).__name__}(rows {self.row_offset}:{last} of {self.global_rows}, "
            f"cols={self.cols}, dtype={self.dtype}, device={self.device})"
        )

    def own_position(self) -> RowPosition:
        """The position of a copy: its memory holds the rows of `self` and no others."""
        held = self.qdata.size(0)
        rows = held if self.position.rows is None else min(held, self.position.rows)
        return replace(self.position, rows=rows)

    def asked_dtype(self, kwargs: Any, op: str) -> torch.dtype:
        """The dtype that a call asks for; default: that of `self`."""
        dtype: torch.dtype = kwargs.get("dtype") or self.dtype
        if not dtype.is_floating_point:
            raise refused(type(self), f"{op} to {dtype}")
        return dtype

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedTensor:
        """A quantized weight has no gradient: `True` is refused."""
        if requires_grad:
            raise refused(type(self), "gradients; expected requires_grad=False")
        super().requires_grad_(False)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        handler = OPS.get(func)
        if handler is None or not isinstance(args[0], QuantizedTensor):
            raise refused(cls, str(func))
        if torch.is_inference_mode_enabled():  # a view of a weight cannot be made there
            with torch.inference_mode(False):
                return handler(args[0], args[1:], kwargs or {})
        return handler(args[0], args[1:], kwargs or {})


def numbers_of(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Some columns of `qdata` as the numbers of `dtype` that they are the bytes of.

    `contiguous` would not copy a single row, which may begin at any byte.
    """
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


# ---- what loading and steps ask of every weight; `tensor_ops` has all other operations -----------


@implements(aten.detach.default, aten.alias.default)
def _alias(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    return self._like(self.qdata)


@implements(aten.empty_like.default)
def _empty_like(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    device = torch.device(kwargs.get("device") or self.device)
    fields: dict[str, Any] = {
        "metadata": [torch.empty_like(entry, device=device) for entry in self.metadata],
        "dtype": self.asked_dtype(kwargs, "aten.empty_like"),
        "position": self.own_position(),
        "device": device,
    }
    if self.store is not None and device.type != "meta":
        return self._like(self.store.empty(self.qdata.shape), **fields)
    pinned = bool(kwargs.get("pin_memory"))
    return self._like(torch.empty_like(self.qdata, device=device, pin_memory=pinned), **fields)


@implements(aten.as_strided.default)
def _as_strided(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """Only strides that `view` gives: contiguous rows from the first on."""
    size, stride, offset = args[0], args[1], (args[2] if len(args) > 2 else 0) or 0
    if offset or list(stride) != list(torch.empty(size, device="meta").stride()):
        raise refused(type(self), f"aten.as_strided to {list(size)}, {list(stride)}, {offset}")
    return _view(self, (size,), {})


@implements(aten.view.default)
def _view(self: QuantizedTensor, args: Any, kwargs: Any) -> QuantizedTensor:
    """The same rows, also flattened: FSDP2 keeps a flat alias of every shard."""
    size, rows = list(args[0]), self.qdata.size(0)
    if size in ([-1], [rows * self.cols]):
        return self._like(self.qdata, shape=[rows * self.cols])
    if size not in ([rows, self.cols], [-1, self.cols], [rows, -1]):
        raise refused(type(self), f"a view of {list(self.shape)} as {size}")
    return self._like(self.qdata, shape=None)
