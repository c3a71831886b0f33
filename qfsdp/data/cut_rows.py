"""Rows that several ranks share: each rank has one part of every row (context parallelism).

    rank 0   tokens 0 .. 3     The rows are cut after labels were shifted: the target of token 3 is
    rank 1   tokens 4 .. 7     token 4, and stands on rank 0.

Parts are contiguous and of equal width. Linears, norms and the loss run over a rank's part.
Attention gathers keys and values (`attend_cut_rows`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

IGNORE_INDEX = -100
"""Label of a position that is not trained. Also the default of `F.cross_entropy`."""


class CutPrompts(NamedTuple):
    """What the queries of a part see in packed pairs, whose prompts stand once.

    Documents are those of `SharedDocuments`. Of each that has queries in this part, its keys are
    its tokens up to the last of them.

    Fields:
        cu_queries, cu_keys: int32 `[documents + 1]`, borders among the queries of this part and
            among the keys.
        sources: int64 `[keys]`, the place of each key among the tokens of all rows up to the end of
            this part. No place comes more than twice.
        places: int64 `[batch * own]`, as of `SharedDocuments`, of the tokens of this part.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    sources: Tensor
    places: Tensor


class CutRows(NamedTuple):
    """The documents of rows that are cut into parts, and what a part cannot know of its rows.

    Fields:
        cu_seqlens: int32 `[documents + 1]`, the borders of the documents among the tokens of the
            whole rows, as in `Batch`. In rows that are no packs, all tokens up to the last target
            and its label are one document, and the rest is another.
        lengths: int64 `[batch]`, for each row the number of tokens up to the label of its last
            target; 0 without a target.
        part: which part of each row this is, from 0.
        parts: into how many parts the rows are cut.
        reach: how many tokens before a part its queries see, at most, in any part: where documents
            begin. Of packed pairs all.
        prompts: of packed pairs. `cu_seqlens` is then that of `SharedDocuments`.
    """

    cu_seqlens: Tensor
    lengths: Tensor
    part: int
    parts: int
    reach: int
    prompts: CutPrompts | None = None

    def documents(self, own: int, before: int) -> Tensor:
        """The numbers of the documents of this part's `own` tokens in each row and of `before`
        tokens ahead of them, int64 `[batch, before + own]`; -1 ahead of the row."""
        width, device = own * self.parts, self.lengths.device
        places = torch.arange(-before, own, device=device) + self.part * own
        rows = width * torch.arange(len(self.lengths), device=device)
        tokens = (rows.unsqueeze(1) + places).to(self.cu_seqlens.dtype)
        return torch.searchsorted(self.cu_seqlens, tokens, right=True).where(places >= 0, -1)

    def places(self, own: int) -> Tensor:
        """The places in a whole row of the `own` tokens of this part, int64 `[own]`."""
        first = self.part * own
        return torch.arange(first, first + own, device=self.lengths.device)


def used_lengths(labels: Tensor) -> Tensor:
    """`CutRows.lengths` of the labels of whole rows, int64 `[batch, seq]`."""
    width = labels.size(1)
    places = torch.arange(1, width + 1, device=labels.device)
    last = ((labels != IGNORE_INDEX) * places).amax(1)
    return torch.where(last > 0, (last + 1).clamp(max=width), 0)


def counted_tokens(labels: Tensor, cut: CutRows | None = None) -> Tensor:
    """bool, like `labels`: the tokens of each row up to its last target. That target is the token
    after its label, so one more than the labels say."""
    if cut is not None:
        return cut.places(labels.size(1)) < cut.lengths.unsqueeze(1)
    places = torch.arange(labels.size(1), device=labels.device)
    return places < used_lengths(labels).unsqueeze(1)


def reach_of(borders: Tensor, lengths: Tensor, width: int, parts: int) -> int:
    """`CutRows.reach` of rows with these borders and lengths. At least 2: compiled code is built
    anew for 0 and 1. Of the fake tensors of a dry run, all that there may be."""
    own = width // parts
    if isinstance(borders, FakeTensor):
        return width - own
    starts = torch.arange(own, width, own)
    tokens = torch.arange(len(lengths)).unsqueeze(1) * width + starts
    begins = borders[torch.searchsorted(borders, tokens.int(), right=True) - 1]
    reached = (tokens - begins) * (starts < lengths.unsqueeze(1))  # what follows is padding
    return max(2, int(reached.max()))


def document_borders(ends: Tensor, total: int) -> Tensor:
    """`Batch.cu_seqlens` of documents one after the other.

    Args:
        ends: integers `[documents]`, where each ends.
        total: number of tokens, the end of the last.
    """
    borders = torch.full((-(-(len(ends) + 1) // 64) * 64,), total, dtype=torch.int32)
    borders[0], borders[1 : len(ends) + 1] = 0, ends
    return borders


def row_borders(lengths: Tensor, width: int) -> Tensor:
    """`CutRows.cu_seqlens` of rows that are no packs."""
    rows = torch.arange(len(lengths)) * width
    ends = torch.stack([rows + lengths, rows + width], 1).flatten()
    return document_borders(ends, len(lengths) * width)


def part_of_rows(batch: Any, part: int, parts: int) -> dict[str, Any]:
    """The fields of a `Batch` that change if a rank has one of `parts` equal parts of every row.
    The width of the rows must be a multiple of `parts`. Tokens without padding are counted in equal
    shares."""
    rows, width = batch.tokens.shape
    lengths, borders = used_lengths(batch.labels), batch.cu_seqlens
    positions = batch.positions
    if positions is None:
        positions = torch.arange(width).expand(rows, -1)
    if borders is None:
        borders = row_borders(lengths, width)
    assert isinstance(borders, Tensor)
    reach = reach_of(borders, lengths, width, parts)
    labels = batch.labels.chunk(parts, 1)[part].contiguous()
    trains_all = batch.targets == batch.labels.numel()  # else the part counts its own
    return {
        "tokens": batch.tokens.chunk(parts, 1)[part].contiguous(),
        "labels": labels,
        "targets": labels.numel() if trains_all else None,
        "num_tokens": batch.num_tokens // parts + (part < batch.num_tokens % parts),
        "positions": positions.chunk(parts, 1)[part].contiguous(),
        "cu_seqlens": CutRows(borders, lengths, part, parts, reach),
    }
