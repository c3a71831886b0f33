"""Empty results of `product`'s operations, for the compiler and for dry runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def of_outputs(x: Tensor, z: Any, weights: Any, *_: Any) -> list[Tensor]:
    """As `forward_op`."""
    return [x.new_empty(*x.shape[:-1], weight.size(0)) for weight in weights]


def of_gradients(
    grads: Any, x: Tensor, dropped: Any, weights: Any, metadata: Any, a: Any, b: Any, *rest: Any
) -> list[Tensor]:
    """As `backward_op`."""
    wants_x, rank = rest[-1], b[0].size(1)
    return [
        x.new_empty(x.shape if wants_x else 0),
        x.new_empty(x.shape if wants_x and dropped is not None else 0),
        x.new_empty(len(b) * rank, x.size(-1), dtype=torch.float32),
        x.new_empty(sum(factor.size(0) for factor in b), rank, dtype=torch.float32),
    ]
