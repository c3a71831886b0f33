"""Batches of a global step, the same samples however many ranks there are.

`StepLoader` has no state: the samples of step N are a function of the seed, N and the global
batch size. Resuming is asking for step N, and a run resumed on other hardware (fewer ranks,
larger micro-batches) sees the same samples in the same steps.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_tokens: int

    @property
    def num_targets(self) -> int:
        """Number of positions that are trained on."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.num_tokens)


def collate(
    samples: Sequence[Mapping[str, Any]],
    *,
    pad_id: int,
    max_seq_len: int | None = None,
    pad_to_multiple_of: int = 8,
) -> Batch:
    """Shift, cut and pad samples into a batch.

    Args:
        samples: each with `tokens` and either `labels` (unshifted, -100 where not trained) or
            `mask` (True where not trained), lists or arrays of one length. No samples at all give
            a single row of padding without targets.
        pad_id: token id of the padding.
        max_seq_len: samples longer than this lose their end.
        pad_to_multiple_of: pad to a multiple of this, but never beyond `max_seq_len`.

    Raises:
        ValueError: tokens and labels of a sample differ in length.
    """
    rows = [_shifted(sample, max_seq_len) for sample in samples]
    longest = max((len(tokens) for tokens, _ in rows), default=1)
    seq = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    if max_seq_len is not None:
        seq = min(seq, max_seq_len)
    shape = (max(len(rows), 1), seq)
    num_tokens = sum(len(tokens) for tokens, _ in rows)
    batch = Batch(torch.full(shape, pad_id), torch.full(shape, IGNORE_INDEX), num_tokens)
    for row, (tokens, labels) in enumerate(rows):
        batch.tokens[row, : len(tokens)] = tokens
        batch.labels[row, : len(labels)] = labels
    return batch


def _shifted(
    sample: Mapping[str, Any], max_seq_len: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[seq]` and their targets `[seq - 1]`, cut to `max_seq_len`."""
    tokens = torch.as_tensor(sample["tokens"], dtype=torch.int64)
    if "labels" in sample:
        labels = torch.as_tensor(sample["labels"], dtype=torch.int64)
    else:
        mask = torch.as_tensor(sample["mask"], dtype=torch.bool)
        labels = tokens.masked_fill(mask, IGNORE_INDEX)
    if tokens.shape != labels.shape:
        raise ValueError(f"a sample has {len(tokens)} tokens but {len(labels)} labels")
    return tokens[:max_seq_len], labels[:max_seq_len][1:]


class StepLoader:
    """This rank's micro-batches of any global step.

    A global step takes the next `batch_size * gradient_accumulation_steps * world_size` samples
    of the epoch's order, which depends on `seed` and the epoch only. So which samples a step
    sees depends on that product but not on its factors. Every sample comes once per epoch; the
    last step of an epoch takes what is left. All ranks get the same number of micro-batches,
    because each forward and backward pass contains collectives: where a short last step leaves a
    rank without samples for a micro-batch, it gets one row of padding without targets.

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
    ) -> None:
        """`batch_size` counts samples per rank and micro-batch; see `collate` for the padding.

        Raises:
            ValueError: the dataset is empty, a count is below 1 or `rank` is out of range.
        """
        if min(batch_size, gradient_accumulation_steps, world_size, len(dataset)) < 1:
            raise ValueError(
                f"batch_size {batch_size}, gradient_accumulation_steps "
                f"{gradient_accumulation_steps}, world_size {world_size} and the dataset's "
                f"length {len(dataset)} must be at least 1"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")
        self.dataset = dataset
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle = seed, shuffle
        self._pad_id, self._max_seq_len = pad_id, max_seq_len
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
            samples = [self.dataset[i] for i in mine]
            batches.append(collate(samples, pad_id=self._pad_id, max_seq_len=self._max_seq_len))
        return batches

    def _epoch_order(self, epoch: int) -> list[int]:
        """Sample indices of an epoch; the last one asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            size = len(self.dataset)
            order = list(range(size))
            if self._shuffle:
                # Hashed, because torch's CPU generator reads only 32 bits of its seed, and
                # because seed + epoch would make runs with neighbouring seeds share orders.
                mixed = random.Random(f"{self._seed} {epoch}").getrandbits(32)
                generator = torch.Generator().manual_seed(mixed)
                order = torch.randperm(size, generator=generator).tolist()
            self._order = (epoch, order)
        return self._order[1]
