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
`copy_` into rows made by `new_zeros` sets it for all of them.

The bytes may be on another device than the weight. With a `ByteStore` they are in host memory or
in a file and are copied to the device when FSDP2 asks for them (`fsdp_pre_all_gather`): ahead of
their use and in its own stream. The gathered result is an ordinary quantized weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.tensor_subclasses.tensor_ops import OPS, RowPosition

FORMATS: dict[str, type[QuantizedTensor]] = {}
"""Quantized formats by their name in configs ("nf4"); every subclass adds itself."""

GatherRows = Callable[[Tensor], Tensor]
"""Collective: this rank's rows of a matrix -> the rows of all ranks, in order."""


class ByteStore(Protocol):
    """Holds the bytes of an offloaded weight (`qfsdp.distributed.stores`)."""

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Uninitialized `qdata` of `shape`, held by this store."""

    def fetch(self, weight: QuantizedTensor) -> Tensor:
        """The rows of `weight` on `weight.device`, uint8 `[rows, row_bytes]`."""


class QuantizedTensor(torch.Tensor):
    """A frozen `[rows, cols]` weight stored as bytes; subclasses define the format.

    Fields:
        qdata: uint8 `[rows, row_bytes]`, the rows that this tensor holds.
        metadata: small tensors of the whole weight; attributes named by `metadata_names`.
        position: index of the first held row in the whole weight.
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
        self.qdata, self.store = qdata, store
        # One attribute each: Dynamo finds inner tensors by name only.
        for name, entry in zip(cls.metadata_names, metadata, strict=True):
            setattr(self, name, entry)
        self.position = position or RowPosition(0)
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
            ValueError: the weight holds NaN or infinity.
        """
        raise NotImplementedError

    # ---- shared by all formats -------------------------------------------------------

    @classmethod
    def empty(
        cls, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedTensor:
        """A whole weight with uninitialized bytes, to be sharded and filled later."""
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
        return self.size(-1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The held rows as a plain `[rows, cols]` tensor of `dtype` (default: `self.dtype`)."""
        return self.dequantize_rows(
            self.fetch().qdata, self.metadata, self.cols, self.row_offset, dtype or self.dtype
        )

    def fetch(self) -> QuantizedTensor:
        """The same weight with its bytes on the device; `self` if they are there already."""
        return self if self.store is None else self._like(self.store.fetch(self), store=None)

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
        return cls(inner["qdata"], metadata, cols, dtype, RowPosition(row_offset), global_rows)

    def _stable_hash_for_caching(self) -> str:
        """Everything that a compiled graph may depend on, for the caches of `torch.compile`."""
        inner = [(tuple(t.shape), t.dtype) for t in (self.qdata, *self.metadata)]
        fields = (self.format, self.device, self.requires_grad, self.__tensor_flatten__()[1], inner)
        return hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        handler = OPS.get(func)
        if handler is None or not isinstance(args[0], QuantizedTensor):
            raise NotImplementedError(
                f"{cls.__name__} does not implement {func}; a quantized weight is frozen "
                "bytes: call .dequantize() for numbers, or qfsdp's `linear` to multiply by it"
            )
        return handler(args[0], args[1:], kwargs or {})

    # ---- FSDP2 -----------------------------------------------------------------------
    # The one-argument form of fsdp_pre_all_gather: with the five-argument form FSDP2 requires
    # inputs of exactly the padded *logical* size, and bytes have another size.

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's bytes, padded so that all ranks send equally many rows; and the metadata."""
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
        """The gathered bytes without padding, as the whole weight.

        The second result, the inner tensors that FSDP2 may free, is empty. The weight is a view of
        the all-gather output, whose storage FSDP2 frees and refills itself. If a view were
        reported, FSDP2 would shrink that storage to the size of the view.
        """
        if out is not None:
            return None  # `out` is a view of the storage that has just been refilled
        qdata = all_gather_outputs[0][: self.global_rows]
        return self._like(qdata, metadata=metadata, position=RowPosition(0), store=None), ()


def frozen_weight(
    weight: Tensor,
    metadata: Sequence[Tensor],
    format: str,
    cols: int,
    row_offset: int,
    dtype: torch.dtype,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Rows of a frozen weight, quantized or plain, as numbers of `dtype`.

    A function of plain tensors and numbers, for custom ops.

    Args:
        weight: the bytes of a quantized weight; or a plain weight `[rows, cols]`, with `format` "".
        row_scale: fp32 `[rows]`, multiplied in before rounding to `dtype`.
    """
    if not format:
        return (weight if row_scale is None else weight * row_scale.unsqueeze(1)).to(dtype)
    dequantize_rows = FORMATS[format].dequantize_rows
    return dequantize_rows(weight, metadata, cols, row_offset, dtype, row_scale)
