"""How long the document of each token is, for rotary embeddings that depend on it."""

from __future__ import annotations

import torch
from torch import Tensor

from qfsdp.data.cut_rows import CutRows, counted_tokens
from qfsdp.data.preferences.shared_prompts import SharedDocuments

Documents = Tensor | SharedDocuments | CutRows | None
"""What `Decoder.forward` takes as `cu_seqlens`."""


def document_lengths(positions: Tensor, labels: Tensor | None, documents: Documents) -> Tensor:
    """The length of every token's document, whatever stands beside it in a batch.

    A row that is no pack ends with its last target, or without labels with its largest position:
    padding does not count.

    Args:
        positions: int64 `[batch or 1, seq]`.
        labels, documents: as `Decoder.forward` takes them (`documents`: its `cu_seqlens`).

    Returns:
        int64 `[batch or 1, seq or 1]`.
    """
    if documents is None and labels is None:
        return positions.amax(1, keepdim=True) + 1
    if documents is None:
        assert labels is not None
        return counted_tokens(labels).sum(1, keepdim=True).clamp(min=1)
    prompts = documents.prompts if isinstance(documents, CutRows) else None
    if isinstance(documents, SharedDocuments):
        bounds, places = documents.cu_seqlens, documents.places
    elif isinstance(documents, CutRows) and prompts is not None:
        bounds, places = documents.cu_seqlens, prompts.places
    elif isinstance(documents, CutRows):
        rows, own = positions.shape
        first = torch.arange(rows, device=positions.device).unsqueeze(1) * own * documents.parts
        bounds, places = documents.cu_seqlens, (first + documents.places(own)).flatten()
    else:
        bounds, places = documents, torch.arange(positions.numel(), device=positions.device)
    after = torch.searchsorted(bounds.long(), places, right=True)
    return (bounds[after] - bounds[after - 1]).long().view_as(positions)


def document_numbers(documents: Documents, rows: int, seq: int) -> Tensor | None:
    """The number of every token's document, int64 `[rows, seq]`; None: rows are documents, or
    `CutRows`, which tell it themselves. Raises ValueError: answers share a prompt, which a state
    along the row cannot."""
    if documents is None or isinstance(documents, CutRows):
        return None
    if isinstance(documents, SharedDocuments):
        raise ValueError("recurrent layers take no packed pairs")
    places = torch.arange(rows * seq, device=documents.device, dtype=documents.dtype)
    return torch.searchsorted(documents, places, right=True).view(rows, seq)
