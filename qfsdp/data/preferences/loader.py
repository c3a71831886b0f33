"""Batches of preferences for each global step, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from qfsdp.data.batch import Batch
from qfsdp.data.loader import StepLoader, collate
from qfsdp.data.preferences.batch import PairBatch as PairBatch
from qfsdp.data.preferences.shared_prompts import share_documents
from qfsdp.data.preferences.tokenized import PackedPreferences, digest, is_paired
from qfsdp.data.preferences.tokenized import RowLimit as RowLimit
from qfsdp.data.preferences.tokenized import build_preferences as build_preferences

Item = Mapping[str, Any]


def collate_preferences(
    items: Sequence[Item], *, paired: bool, min_rows: int = 1, **shape: Any
) -> PairBatch:
    """Pads or packs items of `Preferences` or `PackedPreferences` into a batch.

    Args:
        items: all with two samples, or all with one sample and a label (a bool, or a class).
        paired: which of both, as `items` may be empty.
        min_rows: rows of padding are added up to this number of items.
        shape: as in `collate`.
    """
    min_rows *= 2 if paired and not any("lengths" in item for item in items) else 1
    batch = _marked([one for item in items for one in _samples(item)], min_rows, shape)
    if paired:
        if any("margin" in item for item in items):
            margins = [one for item in items for one in _margins(item)]
            batch = replace(batch, margins=torch.tensor(margins, dtype=torch.float32))
        return _shared(batch, items) if batch.cu_seqlens is not None else batch
    others = [item["mismatched"] for item in items if "mismatched" in item]
    empty = [item for item in items if "mismatched" not in item]  # for a rank without packs
    labels = [label for item in items for label in _as_list(item.get("desirable", []))]
    is_class = bool(labels) and type(labels[0]) is int
    return replace(
        batch,
        desirable=torch.tensor(labels, dtype=torch.int64 if is_class else torch.bool),
        mismatched=_marked([*others, *empty], min_rows, shape),
    )


class PreferenceLoader(StepLoader):
    """This rank's `PairBatch`es of any global step; see `StepLoader`.

    A pair, or an answer with its label, counts as one sample of `batch_size` and of
    `global_batch_size`; packed, a row does. Both samples of a pair are in the same micro-batch.

    Args:
        dataset: of `build_preferences`, or `PackedPreferences`.
        reference: fp32 `[items, 2]`: the reference's log-probabilities of both samples of every
            item of the dataset that is not packed (for a label: of it and of the mismatched one).
            None: batches have none.
        options: as in `StepLoader`.

    Attributes:
        items: the dataset that is not packed.
        paired: whether it has pairs.
        reference: as given; it may be set later.
    """

    def __init__(
        self, dataset: Any, *, reference: torch.Tensor | None = None, **options: Any
    ) -> None:
        self.items = dataset.dataset if isinstance(dataset, PackedPreferences) else dataset
        self.paired = is_paired(self.items)
        self.reference = reference
        super().__init__(
            dataset, **options, collate=partial(collate_preferences, paired=self.paired)
        )

    def step(self, step: int) -> list[PairBatch]:  # type: ignore[override]
        """This rank's micro-batches of global step `step`, counted from 0 over all epochs."""
        return [self._completed(batch) for batch in super().step(step)]

    def epoch(self) -> Iterator[PairBatch]:
        """This rank's micro-batches of the first epoch."""
        for step in range(self.steps_per_epoch):
            yield from self.step(step)

    @property
    def items_digest(self) -> str:
        """A hash of the tokens and labels of all items, in their order."""
        return digest(self.items)

    def items_of(self, batch: PairBatch) -> list[int]:
        """The indices of a batch's items in `items`, in the order of its samples."""
        # Both rows of a pair name it.
        return list(dict.fromkeys(index for row in batch.samples for index in row))

    def _completed(self, batch: Any) -> PairBatch:
        """A batch with the reference's log-probabilities, and its samples row by row."""
        items = self.items_of(batch)
        if self.paired and not batch.is_packed:  # each pair has two rows
            batch = replace(batch, samples=tuple((index,) for index in items for _ in range(2)))
        if self.reference is None:
            return batch
        known = self.reference[items]
        if self.paired:
            return replace(batch, reference_logprobs=known.flatten())
        other = replace(batch.mismatched, reference_logprobs=known[:, 1].contiguous())
        return replace(batch, reference_logprobs=known[:, 0].contiguous(), mismatched=other)


def _samples(item: Item) -> list[Item]:
    """The samples of an item as `collate` reads them; a pack stays one."""
    if "lengths" in item or len(item["parts"]) == 1:
        return [{key: item[key] for key in ("tokens", "labels", "lengths") if key in item}]
    borders = pairwise(accumulate(item["parts"], initial=0))
    return [{key: item[key][a:b] for key in ("tokens", "labels")} for a, b in borders]


def _marked(items: list[Item], min_rows: int, shape: Mapping[str, Any]) -> PairBatch:
    """The batch of samples or packs, with the sample of every position."""
    batch: Batch = collate(items, min_rows=min_rows, **shape)
    sample_ids, number = torch.zeros_like(batch.tokens), 0
    ends: list[int] = []
    for row, item in enumerate(items):
        lengths = torch.tensor(item.get("lengths", [len(item["tokens"])]), dtype=torch.int64)
        ends += (lengths.cumsum(0) + row * batch.tokens.shape[1] - 1).tolist()
        ids = torch.arange(number, number + len(lengths)).repeat_interleave(lengths)
        sample_ids[row, : len(ids)] = ids
        number += len(lengths)
    places = torch.tensor(ends, dtype=torch.int64)
    return PairBatch(**vars(batch), sample_ids=sample_ids, num_samples=number, ends=places)


def _shared(batch: PairBatch, packs: Sequence[Item]) -> PairBatch:
    """The batch of packs of pairs, whose prompts stand once."""
    rows, seq = batch.tokens.shape
    lengths, shared = [], []  # of the documents of all rows, with the padding of each
    for pack in [*packs, *[{"lengths": []}] * (rows - len(packs))]:
        lengths += [*pack["lengths"], seq - sum(pack["lengths"])]
        shared += [*pack.get("shared", []), 0]
    before = torch.tensor(shared).repeat_interleave(torch.tensor(lengths))
    assert batch.positions is not None
    positions = batch.positions + before.view(rows, seq)
    return replace(batch, positions=positions, **share_documents(lengths, shared)._asdict())


def _margins(item: Item) -> list[float]:
    """Those of an item's pairs; 0 where a part of a mixture has none."""
    pairs = len(item["lengths"]) // 2 if "lengths" in item else 1
    return _as_list(item.get("margin", [0.0] * pairs))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
