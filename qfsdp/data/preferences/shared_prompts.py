"""Prompts that two answers share: in packed rows they stand once.

    row:      prompt chosen | rejected          documents:  prompt chosen | prompt rejected

The rejected answer's part begins with the last token of the prompt, which stands twice: its target
is the first token of the answer. Linears, norms and the loss run over the row. Attention runs over
the documents (`attend_shared`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qfsdp.data.cut_rows import CutPrompts, document_borders


class SharedDocuments(NamedTuple):
    """The documents of packed rows, some of which begin with tokens of the document before.

    Fields:
        cu_seqlens: int32 `[documents + 1]`, the borders of the documents written out one after the
            other. The last one is repeated up to a multiple of 64, as in `Batch`.
        sources: int64 `[total]`, the place among the `batch * seq` tokens of each token of these
            documents. No place comes more than twice, so that gradients are added up in one order.
        places: int64 `[batch * seq]`, where each token stands in its own document.
    """

    cu_seqlens: Tensor
    sources: Tensor
    places: Tensor


def share_documents(lengths: Sequence[int], shared: Sequence[int]) -> SharedDocuments:
    """Writes out documents.

    Args:
        lengths: tokens of each document that stand in the rows, in their order, padding included.
        shared: tokens of each that stand at the beginning of the document before.
    """
    own, before = torch.tensor(lengths), torch.tensor(shared)
    ends, starts = (own + before).cumsum(0), own.cumsum(0) - own
    total = int(ends[-1])
    places = torch.arange(int(own.sum())) + before.cumsum(0).repeat_interleave(own)
    sources = torch.empty(total, dtype=torch.int64)
    sources[places] = torch.arange(len(places))
    for at in before.nonzero().squeeze(1).tolist():
        begin, n = int(ends[at - 1]), int(before[at])
        sources[begin : begin + n] = torch.arange(n) + starts[at - 1]
    return SharedDocuments(document_borders(ends, total), sources, places)


def cut_documents(
    documents: SharedDocuments, rows: int, seq: int, part: int, parts: int
) -> CutPrompts:
    """One of `parts` equal parts of every row."""
    stop, total = (part + 1) * seq // parts, len(documents.sources)
    row, at = documents.sources // seq, documents.sources % seq
    is_own = documents.places[documents.sources] == torch.arange(total)
    is_query = is_own & (at >= part * seq // parts) & (at < stop)

    def borders(chosen: Tensor) -> Tensor:
        before = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.cumsum(0)])
        return before[documents.cu_seqlens.long()].int()

    lengths, cu_queries = documents.cu_seqlens.diff(), borders(is_query)
    is_key = (at < stop) & (cu_queries.diff() > 0).repeat_interleave(lengths)
    sources = (row * stop + at)[is_key]
    places = documents.places.view(rows, parts, -1)[:, part].flatten()
    return CutPrompts(cu_queries, borders(is_key), sources, places)
