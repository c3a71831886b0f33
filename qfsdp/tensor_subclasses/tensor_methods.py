"""What torch calls past `__torch_dispatch__`: copying, saving, sharing; the compiler.

torch would use the memory of the tensor itself. A quantized weight has none: its bytes are in inner
tensors. With torch's own methods `share_memory_`, `apply_` and DLPack end the process with a
segmentation fault, an assignment to `.data` leaves the bytes as they are, and `torch.load` reads a
saved weight only with `weights_only=False`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qfsdp.tensor_subclasses.gathered import GatheredTensor
from qfsdp.tensor_subclasses.tensor_ops import RowPosition, refused

FORMATS: dict[str, Any] = {}
"""Quantized formats by name; `quantized_tensor` fills it."""


def _without(name: str) -> Callable[..., Any]:
    """A method that is refused."""

    def method(self: TensorMethods, *args: Any, **kwargs: Any) -> Any:
        raise refused(type(self), f"{name}()")

    return method


class TensorMethods(GatheredTensor):
    """Base class of `QuantizedTensor`."""

    apply_ = _without("apply_")
    map_ = _without("map_")
    numpy = _without("numpy")
    tolist = _without("tolist")
    __dlpack__ = _without("__dlpack__")

    @property
    def data(self) -> Tensor:
        """The same weight without gradient. It cannot be assigned: bytes would stay as they are."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise refused(type(self), "assignment to .data; expected a new nn.Parameter in the module")

    def is_shared(self: Any) -> bool:
        """Whether the bytes are in shared memory."""
        return self.qdata.is_shared()

    def share_memory_(self: Any) -> TensorMethods:
        """Moves bytes and metadata to shared memory."""
        for inner in (self.qdata, *self.metadata):
            inner.share_memory_()
        return self

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = self.fetch().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=False)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        self.check_filled()
        rows = (self.cols, self.dtype, self.row_offset, self.global_rows)
        inner = [self.fetch().qdata, *self.metadata]
        return rebuild, (self.format, inner, *rows, self.dim(), isinstance(self, nn.Parameter))

    # ---- the compiler ----------------------------------------------------------------

    def __tensor_flatten__(self: Any) -> tuple[list[str], tuple[Any, ...]]:
        names = ["qdata", *self.metadata_names]
        return names, (self.cols, self.dtype, self.row_offset, self.global_rows)

    @classmethod
    def __tensor_unflatten__(
        cls: Any, inner: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> TensorMethods:
        cols, dtype, row_offset, global_rows = context
        metadata = [inner[name] for name in cls.metadata_names]
        made: TensorMethods = cls(
            inner["qdata"], metadata, cols, dtype, RowPosition(row_offset), global_rows
        )
        return made

    def _stable_hash_for_caching(self: Any) -> str:
        """Everything that a compiled graph may depend on, for the caches of `torch.compile`."""
        inner = [(tuple(t.shape), t.dtype) for t in (self.qdata, *self.metadata)]
        fields = (self.format, self.device, self.requires_grad, self.__tensor_flatten__()[1], inner)
        return hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()


def rebuild(
    format: str,
    inner: Sequence[Tensor],
    cols: int,
    dtype: torch.dtype,
    row_offset: int,
    global_rows: int,
    dim: int,
    is_parameter: bool,
) -> Tensor:
    """The tensor of which pickle and `torch.save` stored these parts. `torch.load` may call it with
    `weights_only=True`, so it trusts none of them.

    Args:
        inner: the bytes and the metadata.
        dim: 2, or 1 for a flat view.

    Raises:
        ValueError: the parts are not those of a weight in this format.
    """
    if format not in FORMATS:
        raise ValueError(f"quantized tensor: format {format!r}; expected one of {sorted(FORMATS)}")
    qdata, *metadata = inner
    whole = FORMATS[format].empty(global_rows, cols, dtype, "meta")
    shapes = [t.shape for t in (whole.qdata[row_offset:][: qdata.size(0)], *whole.metadata)]
    if [t.shape for t in inner] != shapes or qdata.dtype != torch.uint8:
        found = [tuple(t.shape) for t in inner]
        raise ValueError(
            f"quantized tensor: {format} of shapes {found}; expected {[tuple(s) for s in shapes]}"
        )
    weight: Tensor = whole._like(
        qdata,
        metadata=metadata,
        position=RowPosition(row_offset),
        device=qdata.device,
        shape=None if dim == 2 else [qdata.size(0) * cols],
    )
    return nn.Parameter(weight, requires_grad=False) if is_parameter else weight


torch.serialization.add_safe_globals([rebuild])
