"""Micro-batches of several datasets as one, for adapters that share a pass over the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.cut_rows import document_borders
from qfsdp.data.loader import StepLoader


@dataclass(frozen=True)
class JoinedBatch(Batch):
    """A micro-batch with the rows of several adapters, one after the other.

    Fields:
        rows: number of rows of each; 0: it is not trained in this micro-batch.
        targets_of: number of trained positions of each.
        sample_ids: int64 `[batch, seq]`, the index of the adapter of each position.
    """

    rows: tuple[int, ...] = ()
    targets_of: tuple[int, ...] = ()
    sample_ids: Tensor | None = None


def joined(parts: Sequence[Batch | None]) -> JoinedBatch:
    """One micro-batch of those of all adapters; None: an adapter has none.

    Rows are padded to the longest. Rows of packs have one length already.
    """
    batches = [part for part in parts if part is not None]
    width = max(batch.tokens.size(1) for batch in batches)
    wide = [(0, width - batch.tokens.size(1)) for batch in batches]
    of_batches = list(zip(batches, wide, strict=True))
    rows = tuple(0 if part is None else len(part.tokens) for part in parts)
    ids = torch.tensor([at for at, count in enumerate(rows) for _ in range(count)])
    packs = [batch.positions for batch in batches if batch.positions is not None]
    return JoinedBatch(
        tokens=torch.cat([F.pad(batch.tokens, more) for batch, more in of_batches]),
        labels=torch.cat([F.pad(b.labels, more, value=IGNORE_INDEX) for b, more in of_batches]),
        num_tokens=sum(batch.num_tokens for batch in batches),
        positions=torch.cat(packs) if packs else None,
        cu_seqlens=_borders(batches) if packs else None,
        rows=rows,
        targets_of=tuple(0 if part is None else part.num_targets for part in parts),
        sample_ids=ids.unsqueeze(1).expand(-1, width).contiguous(),
    )


def _borders(batches: Sequence[Batch]) -> Tensor:
    """`Batch.cu_seqlens` of all rows below each other."""
    ends, tokens = [], 0
    for batch in batches:
        assert isinstance(batch.cu_seqlens, Tensor)
        ends.append(batch.cu_seqlens[1:] + tokens)
        tokens += batch.num_slots
    return document_borders(torch.cat(ends).unique_consecutive(), tokens)


class JoinedLoader:
    """This rank's micro-batches of any step of several adapters.

    Args:
        loaders: of each adapter, by name.
        epochs, max_steps: of a run. An adapter whose own updates are done has no rows any longer.

    Attributes:
        steps: number of updates of each adapter.
        total_steps: that of the longest.
    """

    def __init__(
        self, loaders: Mapping[str, StepLoader], epochs: int, max_steps: int | None
    ) -> None:
        self.loaders = dict(loaders)
        most = max_steps or 2**62
        self.steps = {n: min(epochs * one.steps_per_epoch, most) for n, one in loaders.items()}
        self.total_steps = max(self.steps.values())

    def step(self, step: int) -> list[JoinedBatch]:
        """Those of step `step`, counted from 0. The first micro-batches of all adapters are one,
        their second ones are one, and so on."""
        each = [
            loader.step(step) if step < self.steps[name] else []
            for name, loader in self.loaders.items()
        ]
        return [joined(parts) for parts in zip_longest(*each)]
