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
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import qfsdp.compiled
from qfsdp.compiled import on_cpu, opaque
from qfsdp.cpu import product_dtype

aten = torch.ops.aten

FORMATS: dict[str, type[PackedTensor]] = {}
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
    """Where the bytes of an offloaded weight lie (`qfsdp.offload`)."""

    def empty(self, shape: Sequence[int]) -> Tensor:
        """What is `packed` of a tensor with so many rows and bytes per row: unset."""

    def fetch(self, weight: PackedTensor) -> Tensor:
        """The rows that `weight` holds, on `weight.device`, uint8 `[rows, row_bytes]`."""


@dataclass
class _Place:
    """Where a tensor's first row is in the whole weight; `settled` once its rows have come."""

    row_offset: int
    settled: bool = True


class PackedTensor(torch.Tensor):
    """A frozen `[rows, cols]` weight stored as bytes; subclasses define the format.

    Fields:
        packed: uint8 `[rows, row_bytes]`, the rows that this tensor holds.
        extras: small tensors of the whole weight; attributes by their `extra_names`.
        place: which rows those are.
        global_rows: number of rows of the whole weight.
        store: where the bytes are, if not on the device; `packed` then belongs to the store.

    `dtype` is the compute dtype that the weight stands for, not that of its storage; `device` is
    where it computes, and its extras are.
    """

    format: ClassVar[str]
    extra_names: ClassVar[tuple[str, ...]] = ()

    packed: Tensor
    place: _Place
    global_rows: int
    store: Store | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        FORMATS[cls.format] = cls

    @staticmethod
    def __new__(
        cls: type[PackedTensor],
        packed: Tensor,
        extras: Sequence[Tensor],
        cols: int,
        dtype: torch.dtype,
        place: _Place | None = None,
        global_rows: int | None = None,
        shape: Sequence[int] | None = None,
        store: Store | None = None,
        device: torch.device | None = None,
    ) -> PackedTensor:
        size = (packed.size(0), cols) if shape is None else tuple(shape)
        if device is None or store is None:
            device = packed.device
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        self.packed, self.store = packed, store
        # Attributes of their own, as dynamo follows inner tensors by name only.
        for name, extra in zip(cls.extra_names, extras, strict=True):
            setattr(self, name, extra)
        self.place = place or _Place(0)
        self.global_rows = packed.size(0) if global_rows is None else global_rows
        return self

    # ---- what a format defines -------------------------------------------------------

    @staticmethod
    def row_bytes(cols: int) -> int:
        """Bytes that one row of `cols` weights takes."""
        raise NotImplementedError

    @staticmethod
    def extra_shapes(rows: int, cols: int) -> list[tuple[int, ...]]:
        """Shapes (fp32) of the extras of a whole `[rows, cols]` weight."""
        raise NotImplementedError

    @staticmethod
    def dequantize_rows(
        packed: Tensor,
        extras: Sequence[Tensor],
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
    ) -> PackedTensor:
        """A whole weight with unset bytes, to be sharded and filled later."""
        packed = torch.empty(rows, cls.row_bytes(cols), dtype=torch.uint8, device=device)
        extras = [torch.empty(s, device=device) for s in cls.extra_shapes(rows, cols)]
        return cls(packed, extras, cols, dtype)

    @property
    def extras(self) -> tuple[Tensor, ...]:
        """The extras in the order of `extra_names`."""
        return tuple(getattr(self, name) for name in self.extra_names)

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
            self.fetch().packed, self.extras, self.cols, self.row_offset, dtype or self.dtype
        )

    def fetch(self) -> PackedTensor:
        """The same rows with their bytes on the device: itself, if they are there."""
        return self if self.store is None else self._like(self.store.fetch(self), store=None)

    def keep_in(self, store: Store) -> PackedTensor:
        """The same weight of the meta device; given storage, its bytes will be in `store`."""
        return self._like(self.packed, store=store)

    def _like(self, packed: Tensor, **changes: Any) -> PackedTensor:
        """Other bytes with this tensor's extras and place in the whole weight."""
        fields: dict[str, Any] = {
            "extras": self.extras,
            "cols": self.cols,
            "dtype": self.dtype,
            "place": self.place,
            "global_rows": self.global_rows,
            "store": self.store,
            "device": self.device,
        }
        return type(self)(packed, **(fields | changes))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        last = self.row_offset + self.packed.size(0)
        return (
            f"{type(self).__name__}(rows {self.row_offset}:{last} of {self.global_rows}, "
            f"cols={self.cols}, dtype={self.dtype}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ["packed", *self.extra_names]
        return names, (self.cols, self.dtype, self.row_offset, self.global_rows)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> PackedTensor:
        cols, dtype, row_offset, global_rows = context
        extras = [inner[name] for name in cls.extra_names]
        return cls(inner["packed"], extras, cols, dtype, _Place(row_offset), global_rows)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph may depend on, for the caches of `torch.compile`."""
        inner = [(tuple(t.shape), t.dtype) for t in (self.packed, *self.extras)]
        facts = (self.format, self.device, self.requires_grad, self.__tensor_flatten__()[1], inner)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        handler = _OPS.get(func)
        if handler is None or not isinstance(args[0], PackedTensor):
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
        packed = self.fetch().packed
        if missing := rows_per_rank - packed.size(0):
            packed = F.pad(packed, (0, 0, 0, missing))
        return (packed.contiguous(),), self.extras

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        extras: tuple[Tensor, ...],
        param_dtype: torch.dtype,
        *,
        out: PackedTensor | None = None,
    ) -> tuple[PackedTensor, tuple[Tensor, ...]] | None:
        """The gathered bytes, without the padding, as the whole weight.

        No inner tensor is reported for FSDP2 to free: the weight is a view of the all-gather
        output, whose storage FSDP2 frees and refills itself. A view reported here would have
        that storage shrunk to the size of the view.
        """
        if out is not None:
            return None  # `out` views the same storage, which has just been refilled
        packed = all_gather_outputs[0][: self.global_rows]
        return self._like(packed, extras=extras, place=_Place(0), store=None), ()


# ---- the operations that FSDP2, nn.Module and DTensor need, and no others ----------------


@_implements(aten.detach.default, aten.alias.default)
def _alias(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    return self._like(self.packed)


@_implements(aten.clone.default)
def _clone(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    return self._like(self.packed.clone(), extras=[e.clone() for e in self.extras])


@_implements(aten._to_copy.default)
def _to(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    """Moves the bytes; a new dtype changes only what the weight stands for."""
    dtype = kwargs.get("dtype") or self.dtype
    where = {k: kwargs[k] for k in ("device", "non_blocking") if kwargs.get(k) is not None}
    packed = self.packed.to(copy=True, **where)
    return self._like(packed, extras=[e.to(copy=True, **where) for e in self.extras], dtype=dtype)


@_implements(aten.empty_like.default)
def _empty_like(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    device = torch.device(kwargs.get("device") or self.device)
    extras = [torch.empty_like(e, device=device) for e in self.extras]
    if self.store is not None and device.type != "meta":
        return self._like(self.store.empty(self.packed.shape), extras=extras, device=device)
    return self._like(torch.empty_like(self.packed, device=device), extras=extras, device=device)


@_implements(aten.new_zeros.default, aten.new_empty.default)
def _new_rows(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    """Rows for a (padded) shard of this very weight; which ones, `copy_` will say."""
    shape = (args[0][0], self.packed.size(1))
    if self.store is not None and self.device.type != "meta":
        packed = self.store.empty(shape)
    else:
        packed = self.packed.new_zeros(*shape, device=kwargs.get("device"))
    return self._like(packed, place=_Place(self.row_offset, settled=False))


@_implements(aten.split.Tensor)
def _split(self: PackedTensor, args: Any, kwargs: Any) -> list[PackedTensor]:
    rows, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim != 0:
        raise NotImplementedError(f"{type(self).__name__}: aten.split on dim {dim}; rows only")
    starts = range(0, self.packed.size(0), rows)
    return [
        self._like(p, place=_Place(self.row_offset + start))
        for start, p in zip(starts, self.packed.split(rows), strict=True)
    ]


@_implements(aten.slice.Tensor)
def _slice(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    given = tuple(args)
    dim, start, end, step = given + (0, None, None, 1)[len(given) :]
    if dim != 0 or step != 1:
        raise NotImplementedError(
            f"{type(self).__name__}: aten.slice on dim {dim}, step {step}; contiguous rows only"
        )
    rows = range(self.packed.size(0))[start:end]
    packed = self.packed[rows.start : max(rows.start, rows.stop)]
    place = _Place(self.row_offset + rows.start) if rows.start else self.place
    return self._like(packed, place=place)


@_implements(aten.as_strided.default)
def _as_strided(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    """What `view` gives, and no other strides: contiguous rows from the first on."""
    size, stride, offset = args[0], args[1], (args[2] if len(args) > 2 else 0) or 0
    if offset or list(stride) != list(torch.empty(size, device="meta").stride()):
        raise NotImplementedError(
            f"{type(self).__name__}: aten.as_strided to {list(size)}, {list(stride)}, {offset}"
        )
    return _view(self, (size,), {})


@_implements(aten.view.default)
def _view(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    """The same rows; flattened too, as FSDP2 keeps a flat alias of every shard."""
    size = list(args[0])
    if size == [-1] or size == [self.numel()]:
        return self._like(self.packed, shape=[self.numel()])
    if size != list(self.shape):
        raise NotImplementedError(f"{type(self).__name__}: view of {list(self.shape)} as {size}")
    return self._like(self.packed)


@_implements(aten.copy_.default)
def _copy_(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    source = args[0]
    same = type(source) is type(self) and source.packed.shape == self.packed.shape
    if not same or (self.place.settled and source.row_offset != self.row_offset):
        raise NotImplementedError(
            f"aten.copy_ from {type(source).__name__}{list(source.shape)} into {self!r}: "
            "only the same rows in the same format can be copied; quantize first"
        )
    if 0 not in self.packed.stride():  # rows of a file take no memory, there is nothing to copy
        self.packed.copy_(source.packed)
    for mine, theirs in zip(self.extras, source.extras, strict=True):
        if mine is not theirs:
            mine.copy_(theirs)
    if not self.place.settled:
        self.place.row_offset, self.place.settled = source.row_offset, True
    return self


@_implements(aten.is_pinned.default)
def _is_pinned(self: PackedTensor, args: Any, kwargs: Any) -> bool:
    return self.packed.is_pinned()


@_implements(aten._pin_memory.default)
def _pin_memory(self: PackedTensor, args: Any, kwargs: Any) -> PackedTensor:
    return self._like(self.packed.pin_memory(), extras=[e.pin_memory() for e in self.extras])


# ---- the quantized linear ------------------------------------------------------------------
# Two opaque custom ops. If the dequantize code were traced into a compiled decoder layer, the
# partitioner could keep what it likes of it for backward: it kept one byte per weight when we
# tried. Around opaque ops `_PackedLinear` says what is saved: the packed bytes, which are a view
# of what FSDP2 gathers again for backward, and the extras.


_scratch = threading.local()
LARGEST_IN_HEAP = 32 << 20  # M_MMAP_THRESHOLD_MAX of glibc


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of this thread for the CPU, which the next call with the same `use` gives again."""
    size = math.prod(shape) * dtype.itemsize
    held = getattr(_scratch, use, None)
    if held is None or held.numel() < size:
        held = torch.empty(size, dtype=torch.uint8)
        setattr(_scratch, use, held)
    return held[:size].view(dtype).view(shape)


def factor_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in its `product_dtype`; a copy is overwritten by the next one."""
    return x if x.dtype == dtype else _workspace("factor", x.shape, dtype).copy_(x)


def product_in(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b`, to be cast to `dtype`; where that is another one, it is overwritten by the next.

    a is `[..., n]`, b `[n, m]`.
    """
    if a.dtype == dtype:
        return a @ b
    return torch.matmul(a, b, out=_workspace("product", (*a.shape[:-1], b.size(1)), a.dtype))


def _workspace(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Scratch memory for what glibc would take from its heap, where fresh blocks left holes that
    no other tensor fitted into: 1650 MB of private memory instead of 1850 to 2040 for a step of
    SmolLM2 (4 x 512 tokens, `compile: true`). Larger blocks are mapped, and leave none."""
    if math.prod(shape) * dtype.itemsize < LARGEST_IN_HEAP:
        return scratch(use, shape, dtype)
    return torch.empty(shape, dtype=dtype)


def frozen_weight(
    weight: Tensor,
    extras: Sequence[Tensor],
    format: str,
    cols: int,
    row_offset: int,
    dtype: torch.dtype,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Rows of a frozen weight as numbers, to multiply by at once: on CPUs the next call in this
    thread overwrites them.

    Fresh memory costs a CPU more than the numbers: 8192 x 8192 in bf16 take 7 ms (two cores), and
    50 ms into pages that the operating system must hand out first. Accelerators cache theirs.

    Args:
        weight: the bytes of a packed weight, or a plain weight, then `format` is "".
        row_scale: fp32 `[rows]`, multiplied in before rounding to `dtype`.
    """
    if not format:
        return (weight if row_scale is None else weight * row_scale.unsqueeze(1)).to(dtype)
    out = None
    traced = type(weight) is not Tensor and qfsdp.compiled.dry_run is None
    if on_cpu(weight) and not traced:
        out = scratch("weight", (weight.size(0), cols), dtype)
    dequantize = FORMATS[format].dequantize_rows
    return dequantize(weight, extras, cols, row_offset, dtype, row_scale, out)


@opaque("qfsdp::packed_linear")
def _packed_linear(
    x: Tensor, packed: Tensor, extras: Sequence[Tensor], format: str, cols: int, row_offset: int
) -> Tensor:
    dtype = product_dtype(x)
    weight = frozen_weight(packed, extras, format, cols, row_offset, dtype)
    return product_in(factor_in(x, dtype), weight.t(), x.dtype).to(x.dtype)


@opaque("qfsdp::packed_linear_backward")
def _packed_linear_backward(
    grad: Tensor, packed: Tensor, extras: Sequence[Tensor], format: str, cols: int, row_offset: int
) -> Tensor:
    dtype = product_dtype(grad)
    weight = frozen_weight(packed, extras, format, cols, row_offset, dtype)
    return product_in(factor_in(grad, dtype), weight, grad.dtype).to(grad.dtype)


@torch.library.register_fake("qfsdp::packed_linear")
def _(x: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.size(0))


@torch.library.register_fake("qfsdp::packed_linear_backward")
def _(grad: Tensor, packed: Tensor, extras: Any, format: str, cols: int, *_: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], cols)


class _PackedLinear(torch.autograd.Function):
    """`x @ weight.T` of a packed weight, given as its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        extras: Sequence[Tensor],
        which: tuple[str, int, int],  # format, cols, row_offset
    ) -> Tensor:
        ctx.which = which
        ctx.save_for_backward(packed, *extras)
        return _packed_linear(x, packed, extras, *which)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        packed, *extras = ctx.saved_tensors
        grad_x = _packed_linear_backward(grad, packed, extras, *ctx.which)
        return grad_x, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for a plain or a packed frozen weight.

    Args:
        x: `[..., cols]`, floating point; the product is computed in its `product_dtype`.
        weight: `[rows, cols]`. A `PackedTensor` gets no gradient; autograd keeps its bytes
            and nothing else of the weight's size.
        bias: `[rows]` or None.

    Returns:
        `[..., rows]`, of x's dtype.
    """
    if isinstance(weight, PackedTensor):
        which = (weight.format, weight.cols, weight.row_offset)
        y = _PackedLinear.apply(x, weight.packed, weight.extras, which)
    elif product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    else:
        y = _WideLinear.apply(x, weight)
    return y if bias is None else y + bias


class _WideLinear(torch.autograd.Function):
    """`x @ weight.T` of plain matrices in their `product_dtype`; they are kept as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        dtype = product_dtype(x)
        return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dtype, grad_x, grad_weight = product_dtype(grad), None, None
        g = grad.to(dtype)
        if weight is not None:
            grad_x = (g @ weight.to(dtype)).to(grad.dtype)
        if x is not None:
            rows = x.flatten(0, -2).to(dtype)
            grad_weight = (g.flatten(0, -2).t() @ rows).to(grad.dtype)
        return grad_x, grad_weight
