"""Batches of preferences: answers in pairs, or answers with a label."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.cut_rows import CutPrompts, CutRows
from qfsdp.data.preferences.shared_prompts import SharedDocuments, cut_documents


@dataclass(frozen=True)
class PairBatch(Batch):
    """A micro-batch of samples (a prompt with one answer) whose log-probabilities are compared.

    Only answers have labels. The samples are numbered in the order of their positions: pairs as
    chosen, rejected, chosen, rejected, .... Each sample has a row of its own; packed, both of a
    pair stand in one row, with their prompt once.

    Fields:
        sample_ids: int64 `[batch, seq]`, the number of the sample that a position belongs to. It
            is 0 where none does (padding has no label, so it counts nowhere).
        num_samples: the samples are 0 .. num_samples - 1; 0 on a rank for which none is left.
        ends: int64 `[num_samples]`, the place of each sample's last token among `batch * seq`.
        desirable: bool `[num_samples]`, whether the answer is a good one; int64: the class of the
            sample. None: samples are pairs.
        margins: of pairs, fp32 `[num_samples / 2]`: by how much the first answer is better; None:
            the data does not say.
        mismatched: of labelled answers: the prompts of the same samples with answers of others, for
            KTO's estimate of the KL divergence. Sample i has the prompt of sample i. The data
            decide which answer, not the ranks or micro-batches.
        reference_logprobs: fp32 `[num_samples]`, the reference's log-probabilities if they are
            known ahead; None: the model computes them.
        target_counts: of cut rows, `targets_of_samples` of the whole rows.
        sources, places: of packed pairs, see `SharedDocuments`; `cu_seqlens` is then the one there.
    """

    sample_ids: torch.Tensor = field(kw_only=True)
    num_samples: int = field(kw_only=True)
    ends: torch.Tensor | None = field(default=None, kw_only=True)
    margins: torch.Tensor | None = field(default=None, kw_only=True)
    desirable: torch.Tensor | None = field(default=None, kw_only=True)
    mismatched: PairBatch | None = field(default=None, kw_only=True)
    reference_logprobs: torch.Tensor | None = field(default=None, kw_only=True)
    target_counts: torch.Tensor | None = field(default=None, kw_only=True)
    sources: torch.Tensor | None = field(default=None, kw_only=True)
    places: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def documents(self) -> Any:
        """As of `Batch`; of packed pairs `SharedDocuments`."""
        borders = self.cu_seqlens
        if not isinstance(borders, torch.Tensor) or self.sources is None or self.places is None:
            return borders
        return SharedDocuments(borders, self.sources, self.places)

    @property
    def is_packed(self) -> bool:
        """Of pairs: whether rows hold several samples."""
        cut = self.cu_seqlens
        return cut.prompts is not None if isinstance(cut, CutRows) else cut is not None

    @property
    def num_pairs(self) -> int:
        """Number of pairs; 0 of answers with a label."""
        return self.num_samples // 2 if self.desirable is None else 0

    def to(self, device: torch.device | str) -> PairBatch:
        """The same batch on `device`."""
        moved = super().to(device)
        assert isinstance(moved, PairBatch)
        if self.mismatched is None:
            return moved
        return replace(moved, mismatched=self.mismatched.to(device))

    def cut(self, part: int, parts: int) -> PairBatch:
        """As of `Batch`."""
        cut = super().cut(part, parts)
        if isinstance(documents := self.documents, SharedDocuments):
            assert isinstance(cut.cu_seqlens, CutRows)
            rows, seq = self.tokens.shape
            prompts = cut_documents(documents, rows, seq, part, parts)
            borders = cut.cu_seqlens._replace(prompts=prompts, reach=seq)
            cut = replace(cut, cu_seqlens=borders, sources=None, places=None)
        return replace(
            cut,
            sample_ids=self.sample_ids.chunk(parts, 1)[part].contiguous(),
            target_counts=self.targets_of_samples(),
            mismatched=None if self.mismatched is None else self.mismatched.cut(part, parts),
        )

    def targets_of_samples(self) -> torch.Tensor:
        """Number of targets of each sample, int64 `[num_samples]`."""
        if self.target_counts is not None:
            return self.target_counts
        counts = self.sample_ids.new_zeros(max(self.num_samples, 1))
        is_target = (self.labels != IGNORE_INDEX).long()
        return counts.index_add_(0, self.sample_ids.flatten(), is_target.flatten())[
            : self.num_samples
        ]


def full_preferences(batch: Batch, paired: bool, parts: int = 1) -> PairBatch:
    """A batch of full rows as one of preferences, for estimates: one sample per row, or of pairs in
    packed rows two. Attention then runs over twice as many tokens: prompts are all but a row.

    Args:
        parts: into how many parts the rows are then cut; the last one is returned, which sees the
            most keys.
    """
    rows, seq = batch.tokens.shape
    per_row = 2 if paired and batch.cu_seqlens is not None else 1
    halves = torch.arange(seq) * per_row // seq
    ids = torch.arange(rows).unsqueeze(1) * per_row + halves
    count = rows * per_row
    ends = torch.arange(1, count + 1) * (rows * seq) // count - 1
    full = PairBatch(**vars(batch), sample_ids=ids, num_samples=count, ends=ends)
    full = full if parts == 1 else full.cut(parts - 1, parts)
    if per_row == 2:  # in a dry run only sizes count
        places = torch.zeros(full.tokens.numel(), dtype=torch.int64)
        sources = torch.zeros(2 * rows * seq, dtype=torch.int64)
        if not isinstance(cut := full.cu_seqlens, CutRows):
            return replace(full, sources=sources, places=places)
        prompts = CutPrompts(cut.cu_seqlens, cut.cu_seqlens, sources, places)
        return replace(full, cu_seqlens=cut._replace(prompts=prompts))
    if paired:
        return full
    labels = torch.arange(rows) % 2 == 0
    return replace(full, desirable=labels, mismatched=full)
