"""The training loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from qfsdp.data.loader import IGNORE_INDEX


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the target tokens.

    A sum, because the mean is over the target tokens of the *global* step, which no single
    micro-batch knows: divide by that count once, and the update no longer depends on how
    samples are split over ranks and micro-batches.

    Args:
        logits: `[batch, seq, vocab]`, floating point.
        labels: int64 `[batch, seq]`, the target of each position; -100 for none.

    Returns:
        fp32 scalar; 0 where there is no target.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
