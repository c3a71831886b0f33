"""Which sizes of a compiled layer's inputs vary from batch to batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfsdp.data.cut_rows import CutRows
from qfsdp.data.preferences.shared_prompts import SharedDocuments
from qfsdp.modules.attention.document_lengths import Documents


def mark_lengths(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Documents,
    counted: Tensor | None,
) -> None:
    """Tells the compiler which sizes vary. Without it the compiler builds everything for the first
    batch, and again for the first batch of another length (20 s each for SmolLM2 on a CPU)."""
    if cu_seqlens is not None:  # packed rows have one length, but any number of documents
        shared = isinstance(cu_seqlens, SharedDocuments)
        given: list[Any] = [cu_seqlens]
        if isinstance(cu_seqlens, tuple):
            given = [*cu_seqlens[: 1 + shared]]  # tokens written out
        if isinstance(cu_seqlens, CutRows) and cu_seqlens.prompts is not None:
            given += cu_seqlens.prompts[:3]
        for tensor in given:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        if not isinstance(cu_seqlens, CutRows):
            return
    for tensor in (x, cos, sin, counted):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    if mask is not None:
        torch._dynamo.maybe_mark_dynamic(mask, [2, 3])
