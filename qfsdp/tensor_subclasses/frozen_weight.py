"""A frozen weight, quantized or plain, as a product reads it: its bytes, and its rows as numbers.

A layer that is computed in tiles of tokens multiplies every tile by the same weights. Within
`weights_held()` each quantized weight is dequantized for its first product, and stays until the
`with` block ends. Nothing may change the weights or DoRA's ratios in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qfsdp.tensor_subclasses.dtensor import local_rows
from qfsdp.tensor_subclasses.kernels.compiled import on_cpu
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

# Weights at a time in `refresh_dora_norms`: 8 MB in bf16 stay in a CPU's cache. On a GPU 128 MB:
# pieces that fit its cache take longer, even as one graph. All linears of an 8B model on an H200,
# as a graph: 10.2 ms; in pieces of 16, 32 and 64 MB 14.4, 11.9 and 11.2 ms.
NORM_CHUNK_WEIGHTS, NORM_CHUNK_ON_GPU = 1 << 22, 1 << 26


def bytes_of(weight: Tensor) -> tuple[Tensor, list[Tensor], str, int]:
    """Bytes, metadata, format and first row of a quantized weight, as `frozen_weight` takes them;
    of a plain one itself, [], "" and 0. Raises ValueError: a product with it would be wrong
    (`QuantizedTensor.check_product`)."""
    if not isinstance(weight, QuantizedTensor):
        return weight, [], "", 0
    position = weight.position
    # Traced into a compiled layer, the check made it keep weights of norms for backward.
    if not torch.compiler.is_compiling() and (
        not position.known or weight.dim() != 2 or weight.requires_grad
    ):
        weight.check_product()
    metadata = [getattr(weight, name) for name in weight.metadata_names]
    return weight.qdata, metadata, weight.format, position.row_offset


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
    rows = FORMATS[format].dequantize_rows
    return held(weight, dtype, lambda: rows(weight, metadata, cols, row_offset, dtype, row_scale))


def held_rows(weight: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """The rows of a frozen weight that match this rank's rows of `like`, on `device`. Fewer than
    the rank holds if the base is replicated and the adapters are sharded."""
    if not isinstance(weight, DTensor):
        return weight[local_rows(like)] if isinstance(like, DTensor) else weight
    held = weight.to_local()
    if isinstance(held, QuantizedTensor):
        held = held.fetch()
    return held.to(device)


def row_chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields a frozen weight in pieces, as the plain rows that forward multiplies by."""
    chunk = NORM_CHUNK_WEIGHTS if on_cpu(weight) else NORM_CHUNK_ON_GPU
    step = max(1, chunk // weight.size(1))
    for start in range(0, weight.size(0), step):
        part = slice(start, min(start + step, weight.size(0)))
        rows = weight[part] if step < weight.size(0) else weight
        if isinstance(rows, QuantizedTensor):
            held, metadata, format, first = bytes_of(rows)
            rows = frozen_weight(held, metadata, format, rows.size(1), first, rows.dtype)
        yield part, rows


# ---- weights that tiles share --------------------------------------------------------------------

_Key = tuple[int, int | torch.SymInt, torch.dtype]
# No context variable: backward may run in another thread than forward.
_held: dict[_Key, Tensor] | None = None


@contextmanager
def weights_held() -> Iterator[None]:
    """Within it, what `held` has made once is there again."""
    global _held
    before, _held = _held, {}
    try:
        yield
    finally:
        _held = before


def held(qdata: Tensor, dtype: torch.dtype, dequantized: Callable[[], Tensor]) -> Tensor:
    """`dequantized()`, made once for these bytes and this dtype within `weights_held()`."""
    if _held is None:
        return dequantized()
    key = (qdata.untyped_storage()._cdata, qdata.storage_offset(), dtype)
    if key not in _held:
        _held[key] = dequantized()
    return _held[key]
