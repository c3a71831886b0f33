"""Batches of a global step, the same samples however many ranks there are.

`StepLoader` has no state: the samples of step N are a function of the seed, N and the global
batch size. Resuming is asking for step N, and a run resumed on other hardware (fewer ranks,
larger micro-batches) sees the same samples in the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch

from qfsdp.cli.errors import UserError
from qfsdp.data.shuffling import shuffled_indices

IGNORE_INDEX = -100
"""Label of a position that is not trained on; `F.cross_entropy`'s default."""


class MapDataset(Protocol):
    """What the loader needs of a dataset: a length, and items as `collate` takes them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Fields:
        tokens: int64 `[batch, seq]`, padded on the right with the pad id.
        labels: int64 `[batch, seq]`, already shifted: `labels[b, t]` is the target of
            `tokens[b, t]`, that is token t + 1 or -100 (not trained, padding, last position).
        num_tokens: tokens without the padding.
        positions: int64 `[batch, seq]`, from 0 on in each sample; None if a row is one sample.
        cu_seqlens: int32 `[documents + 1]`, where each starts and ends among the `batch * seq`
            tokens: a sample, or the padding of a row. The last end is repeated until the length
            is a multiple of 64, so that compiled code sees few lengths. None as above.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_tokens: int
    positions: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        """Number of tokens with the padding."""
        return self.tokens.numel()

    @property
    def num_targets(self) -> int:
        """Number of positions that are trained on."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def collate(
    samples: Sequence[Mapping[str, Any]],
    *,
    pad_id: int,
    max_seq_len: int | None = None,
    pad_to_multiple_of: int = 8,
    min_rows: int = 1,
) -> Batch:
    """Shift, cut and pad samples or packs of samples into a batch, one per row.

    Args:
        samples: each with `tokens` and either `labels` (unshifted, -100 where not trained) or
            `mask` (True where not trained), lists or arrays of one length. With `lengths`, a list
            of int, it is a pack: several samples one after the other. Labels are shifted within
            each, so that the last token of one has no target in the next.
        pad_id: token id of the padding.
        max_seq_len: samples longer than this lose their end; packs must not be, and are padded to
            it exactly.
        pad_to_multiple_of: pad samples to a multiple of this, but never beyond `max_seq_len`.
        min_rows: fewer rows than this are filled up with rows of padding without targets.

    Returns:
        a batch with at least one row; `positions` and `cu_seqlens` are those of packs.

    Raises:
        ValueError: tokens and labels of a sample differ in length, some items are packs and others
            are not, or a pack does not fit into `max_seq_len` or its lengths.
    """
    packs = _pack_lengths(samples, max_seq_len)
    rows = [tokens_and_labels(sample, max_seq_len) for sample in samples]
    longest = max((len(tokens) for tokens, _ in rows), default=1)
    seq = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    if max_seq_len is not None:
        seq = max_seq_len if packs else min(seq, max_seq_len)
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
    """Both int64 `[seq]`, cut to `max_seq_len` and not shifted; see `collate`."""
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
    """Lengths of the samples in each pack; none if the items are no packs."""
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
    """The batch with its positions and `cu_seqlens`; no target crosses a border any more."""
    rows, seq = batch.tokens.shape
    packs = packs + [[]] * (rows - len(packs))
    lengths = torch.tensor([n for pack in packs for n in (*pack, seq - sum(pack))])
    ends = lengths.cumsum(0)
    batch.labels.view(-1)[ends - 1] = IGNORE_INDEX
    positions = torch.arange(rows * seq) - (ends - lengths).repeat_interleave(lengths)
    cu_seqlens = torch.full((-(-(len(ends) + 1) // 64) * 64,), rows * seq, dtype=torch.int32)
    cu_seqlens[0], cu_seqlens[1 : len(ends) + 1] = 0, ends
    return replace(batch, positions=positions.view(rows, seq), cu_seqlens=cu_seqlens)


class StepLoader:
    """This rank's micro-batches of any global step.

    A global step takes the next `batch_size * gradient_accumulation_steps * world_size` samples
    of the epoch's order, which depends on `seed` and the epoch only. So which samples a step
    sees depends on that product but not on its factors. Every sample comes once per epoch; the
    last step of an epoch takes what is left. All ranks get the same number of micro-batches,
    because each forward and backward pass contains collectives: where a short last step leaves a
    rank without samples for a micro-batch, it gets one row of padding without targets.

    A `PackedDataset` is a dataset like any other, its samples being packs. Its batches all have
    the same shape, `[batch_size, max_seq_len]`, filled up with rows of padding.

    Attributes:
        dataset: what it was given.
        global_batch_size: samples of a global step, over all ranks and micro-batches.
        steps_per_epoch: global steps per pass over the dataset, the short one included.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        batch_size: int,
        gradient_accumulation_steps: int,
        rank: int,
        world_size: int,
        seed: int,
        pad_id: int,
        max_seq_len: int | None,
        shuffle: bool = True,
        pad_to_multiple_of: int = 8,
        fill_rows: bool = False,
    ) -> None:
        """`batch_size` counts samples per rank and micro-batch; see `collate` for the padding.
        With `fill_rows`, a short batch is filled up to `batch_size` with rows of padding.

        Raises:
            UserError: the dataset's items are packed already.
            ValueError: the dataset is empty, a count is below 1 or `rank` is out of range.
        """
        if min(batch_size, gradient_accumulation_steps, world_size, len(dataset)) < 1:
            raise ValueError(
                f"batch_size {batch_size}, gradient_accumulation_steps "
                f"{gradient_accumulation_steps}, world_size {world_size} and the dataset's "
                f"length {len(dataset)} must be at least 1"
            )
        if "seq_lens" in dataset[0]:  # torchtune's packs, whose borders are kept otherwise
            raise UserError("dataset.packed: true; leave it out, and set packed=true instead")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")
        self.dataset = dataset
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle = seed, shuffle
        empty_pack: Mapping[str, Any] | None = getattr(dataset, "empty_pack", None)
        self._nothing = [] if empty_pack is None else [empty_pack]
        self._collate = partial(
            collate,
            pad_id=pad_id,
            max_seq_len=max_seq_len,
            pad_to_multiple_of=pad_to_multiple_of,
            min_rows=batch_size if fill_rows or self._nothing else 1,
        )
        self._micro_batch = batch_size * world_size
        self.global_batch_size = self._micro_batch * gradient_accumulation_steps
        self._order: tuple[int, list[int]] | None = None
        self.steps_per_epoch = -(-len(dataset) // self.global_batch_size)

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global step `step`, counted from 0 over all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.global_batch_size
        chosen = self._epoch_order(epoch)[start : start + self.global_batch_size]
        batches = []
        for begin in range(0, len(chosen), self._micro_batch):
            # Every world_size-th sample, so that a short micro-batch is spread over the ranks.
            mine = chosen[begin : begin + self._micro_batch][self._rank :: self._world_size]
            batches.append(self._collate([self.dataset[i] for i in mine] or self._nothing))
        return batches

    def _epoch_order(self, epoch: int) -> list[int]:
        """Sample indices of an epoch; the last one asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            size = len(self.dataset)
            order = list(range(size))
            if self._shuffle:
                order = shuffled_indices(size, f"{self._seed} {epoch}").tolist()
            self._order = (epoch, order)
        return self._order[1]
