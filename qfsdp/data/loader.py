"""Batches of each global step, with the same samples for any number of ranks.

`StepLoader` has no state. The samples of step N depend on the seed, on N and on the global batch
size. A resumed run asks for step N. It sees the same samples in the same steps, even with fewer
ranks or larger micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from qfsdp.common.errors import UserError
from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.cut_rows import document_borders
from qfsdp.data.shuffling import shuffled_indices

T = TypeVar("T")


class MapDataset(Protocol):
    """A dataset that the loader can read: it has a length and items for `collate`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def collate(
    samples: Sequence[Mapping[str, Any]],
    *,
    pad_id: int,
    max_seq_len: int | None = None,
    pad_to_multiple_of: int = 8,
    min_rows: int = 1,
    parts: int = 1,
) -> Batch:
    """Shifts, cuts and pads samples or packs into a batch, one per row.

    Args:
        samples: each has `tokens` and either `labels` (not shifted, -100 where not trained) or
            `mask` (True where not trained), lists or arrays of equal length. An item with
            `lengths`, a list of int, is a pack: several samples one after the other. Labels are
            shifted within each sample, so the last token of a sample has no target.
        pad_id: token id of the padding.
        max_seq_len: samples longer than this lose their end. Packs are padded to exactly this
            length and must not be longer.
        pad_to_multiple_of: samples are padded to a multiple of this, but not beyond `max_seq_len`.
        min_rows: rows of padding without targets are added up to this number.
        parts: rows are padded further, to a multiple of this, so that they can be cut.

    Returns:
        A batch with at least one row. `positions` and `cu_seqlens` are set for packs only.

    Raises:
        ValueError: tokens and labels of a sample differ in length, only some of the items are
            packs, or a pack is longer than `max_seq_len` or than its lengths say.
    """
    packs = _pack_lengths(samples, max_seq_len)
    rows = [tokens_and_labels(sample, max_seq_len) for sample in samples]
    longest = max((len(tokens) for tokens, _ in rows), default=1)
    seq = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    if max_seq_len is not None:
        seq = max_seq_len if packs else min(seq, max_seq_len)
    seq = -(-seq // parts) * parts
    shape = (max(len(rows), min_rows), seq)
    num_tokens = sum(len(tokens) for tokens, _ in rows)
    batch = Batch(torch.full(shape, pad_id), torch.full(shape, IGNORE_INDEX), num_tokens)
    for row, (tokens, labels) in enumerate(rows):
        targets = labels[1:]
        batch.tokens[row, : len(tokens)] = tokens
        batch.labels[row, : len(targets)] = targets
    return _mark_documents(batch, packs) if packs else batch


def tokens_and_labels(
    sample: Mapping[str, Any], max_seq_len: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of an item of `collate`, each int64 `[seq]`.

    Cut to `max_seq_len`. Labels are not shifted.
    """
    tokens = torch.as_tensor(sample["tokens"], dtype=torch.int64)
    if "labels" in sample:
        labels = torch.as_tensor(sample["labels"], dtype=torch.int64)
    else:
        mask = torch.as_tensor(sample["mask"], dtype=torch.bool)
        labels = tokens.masked_fill(mask, IGNORE_INDEX)
    if tokens.shape != labels.shape:
        raise ValueError(f"a sample has {len(tokens)} tokens but {len(labels)} labels")
    return tokens[:max_seq_len], labels[:max_seq_len]


def _pack_lengths(samples: Sequence[Mapping[str, Any]], max_seq_len: int | None) -> list[list[int]]:
    """Lengths of the samples in each pack. Empty if the items are not packs."""
    packs = [list(sample["lengths"]) for sample in samples if "lengths" in sample]
    if packs and len(packs) < len(samples):
        raise ValueError(f"{len(packs)} of {len(samples)} items are packs; expected all or none")
    for sample, lengths in zip(samples, packs, strict=False):
        total = sum(lengths)
        if max_seq_len is None or total > max_seq_len:
            raise ValueError(f"a pack has {total} tokens; max_seq_len is {max_seq_len}")
        if total != len(sample["tokens"]):
            raise ValueError(f"a pack has {len(sample['tokens'])} tokens but lengths of {total}")
    return packs


def _mark_documents(batch: Batch, packs: list[list[int]]) -> Batch:
    """Sets `positions` and `cu_seqlens`, and removes targets that lie in the next document."""
    rows, seq = batch.tokens.shape
    packs = packs + [[]] * (rows - len(packs))
    lengths = torch.tensor([n for pack in packs for n in (*pack, seq - sum(pack))])
    ends = lengths.cumsum(0)
    batch.labels.view(-1)[ends - 1] = IGNORE_INDEX
    positions = torch.arange(rows * seq) - (ends - lengths).repeat_interleave(lengths)
    borders = document_borders(ends, rows * seq)
    return replace(batch, positions=positions.view(rows, seq), cu_seqlens=borders)


class Shares:
    """Splits the items of each global step over ranks and micro-batches.

    A rank takes every `world_size`-th item of a micro-batch. All ranks get the same number of
    micro-batches, because forward and backward passes contain collectives. A rank without items
    gets one row of padding without targets. With context parallelism, neighbouring ranks count as
    one: they get the same items, and a part of each row.

    Attributes:
        global_batch_size: items per global step, over all ranks and micro-batches.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        gradient_accumulation_steps: int,
        rank: int,
        world_size: int,
        pad_id: int,
        max_seq_len: int | None,
        pad_to_multiple_of: int = 8,
        fill_rows: bool = False,
        empty_pack: Mapping[str, Any] | None = None,
        collate: Callable[..., Batch] = collate,
        context_parallel: int = 1,
    ) -> None:
        """
        Args:
            batch_size: samples per rank and micro-batch.
            pad_id, max_seq_len, pad_to_multiple_of: as in `collate`.
            fill_rows: add rows of padding to short batches, up to `batch_size`.
            empty_pack: as in `PackedDataset`; None for samples.
            collate: makes a batch of items, like the function of that name.
            context_parallel: neighbouring ranks that share each row (`sharding.context_parallel`).

        Raises:
            ValueError: a count is below 1, or `rank` is out of range.
        """
        if min(batch_size, gradient_accumulation_steps, world_size) < 1:
            raise ValueError(
                f"batch_size {batch_size}, gradient_accumulation_steps "
                f"{gradient_accumulation_steps}, world_size {world_size}; expected at least 1"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank}; expected 0 to {world_size - 1}")
        if world_size % context_parallel:
            raise ValueError(f"context_parallel {context_parallel} does not divide {world_size}")
        self._rank, self._part = divmod(rank, context_parallel)
        self._world_size, self._parts = world_size // context_parallel, context_parallel
        self._no_items = [] if empty_pack is None else [empty_pack]
        self._collate = partial(
            collate,
            pad_id=pad_id,
            max_seq_len=max_seq_len,
            pad_to_multiple_of=pad_to_multiple_of,
            min_rows=batch_size if fill_rows or self._no_items else 1,
            parts=context_parallel,
        )
        self._micro_batch = batch_size * self._world_size
        self.global_batch_size = self._micro_batch * gradient_accumulation_steps

    def of_rank(
        self,
        chosen: Sequence[T],
        item: Callable[[T], Mapping[str, Any]],
        samples: Callable[[T], tuple[int, ...]],
    ) -> list[Batch]:
        """This rank's micro-batches.

        Args:
            chosen: the items of the step, in order, by whatever names them.
            item: reads an item for `collate`.
            samples: the indices of the samples that an item holds.
        """
        batches = []
        for begin in range(0, len(chosen), self._micro_batch):
            # Every world_size-th item: a short micro-batch is spread over the ranks.
            mine = chosen[begin : begin + self._micro_batch][self._rank :: self._world_size]
            batch = self._collate([item(one) for one in mine] or self._no_items)
            if self._parts > 1:
                batch = batch.cut(self._part, self._parts)
            batches.append(replace(batch, samples=tuple(map(samples, mine))))
        return batches


class StepLoader:
    """This rank's micro-batches of any global step.

    A global step takes the next `batch_size * gradient_accumulation_steps * world_size` samples of
    the epoch's order, which depends on `seed` and the epoch only. The samples of a step depend on
    that product but not on its factors. Every sample comes once per epoch. The last step of an
    epoch may be short. `Shares` says what a rank gets.

    The samples of a `PackedDataset` are packs. Its batches all have the shape
    `[batch_size, max_seq_len]`; rows of padding are added where packs are missing.

    Attributes:
        dataset: the dataset that it reads.
        global_batch_size: samples per global step, over all ranks and micro-batches.
        steps_per_epoch: global steps per pass over the dataset, including the short one.
    """

    def __init__(
        self, dataset: MapDataset, *, seed: int, shuffle: bool = True, **shares: Any
    ) -> None:
        """
        Args:
            seed, shuffle: of the order of samples.
            shares: `batch_size`, `gradient_accumulation_steps`, `rank`, `world_size`, `pad_id`,
                `max_seq_len` and whatever else `Shares` takes.

        Raises:
            UserError: the items are torchtune's packs.
            ValueError: the dataset is empty, or as `Shares`.
        """
        if not len(dataset):
            raise ValueError("the dataset's length is 0; expected at least 1")
        if "seq_lens" in dataset[0]:  # torchtune's packs mark the borders in another way
            raise UserError(
                "dataset.packed: true; expected packed=true at the top of the config instead"
            )
        self.dataset = dataset
        self._seed, self._shuffle = seed, shuffle
        self._shares = Shares(**shares, empty_pack=getattr(dataset, "empty_pack", None))
        self.global_batch_size = self._shares.global_batch_size
        self._order: tuple[int, list[int]] | None = None
        self.steps_per_epoch = -(-len(dataset) // self.global_batch_size)

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global step `step`, counted from 0 over all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.global_batch_size
        chosen = self._epoch_order(epoch)[start : start + self.global_batch_size]
        return self._shares.of_rank(chosen, self.dataset.__getitem__, self._samples)

    def example(self, step: int) -> Batch:
        """A micro-batch of a step, to look at."""
        return self.step(step)[0]

    def keep_in(self, progress: dict[str, Any]) -> dict[str, Any]:
        """`progress`, the numbers that a checkpoint keeps: this loader needs none of its own."""
        return progress

    def _samples(self, index: int) -> tuple[int, ...]:
        """The samples that item `index` of the dataset holds: itself, or those of a pack."""
        packed = hasattr(self.dataset, "empty_pack")
        of_pack = getattr(self.dataset, "samples", None) if packed else None
        return (index,) if of_pack is None else tuple(of_pack(index))

    def _epoch_order(self, epoch: int) -> list[int]:
        """Sample indices of an epoch, in its order. Keeps the last epoch's."""
        if self._order is None or self._order[0] != epoch:
            size = len(self.dataset)
            order = list(range(size))
            if self._shuffle:
                order = shuffled_indices(size, f"{self._seed} {epoch}").tolist()
            self._order = (epoch, order)
        return self._order[1]
