"""Weights that are dequantized once for several products.

A layer that is computed in tiles of tokens multiplies every tile by the same weights. Within
`weights_held()` each quantized weight is dequantized for its first product, and stays until the
`with` block ends. Nothing may change the weights or DoRA's ratios in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
