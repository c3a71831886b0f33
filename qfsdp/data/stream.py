"""Batches of data that is read while training, for data larger than the disk.

The rows of the data, in their order, are cut into blocks of `shuffle_buffer` rows. A process in the
background reads and tokenizes the next block while the last one trains. The samples of a block are
packed, if they are to be, and shuffled; a global step takes the next items, across blocks. After
the last row the first one follows: the next epoch.

What a step holds depends on the data, the seed and the global batch size, not on the ranks: each of
them reads and tokenizes everything and takes its share. That costs a core and a download per rank,
and no rank ever waits for another one. A checkpoint keeps the place of the current block in the
data and the number of its items that have been used, so a resumed run tokenizes one block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import long_wait
from qfsdp.common.progress import moved
from qfsdp.data.batch import Batch
from qfsdp.data.files.file_rows import RowStream
from qfsdp.data.loader import MapDataset, Shares, StepLoader, collate
from qfsdp.data.packing import PackedDataset
from qfsdp.data.row_tokenizer import Counts, RowTokenizer, TokenizedDataset
from qfsdp.data.shuffling import shuffled_indices
from qfsdp.data.tokenize_processes import Background

LOOKED_AT = 8  # first rows, tokenized before a model is loaded
NO_END = 2**62


@dataclass(frozen=True)
class Place:
    """Where a block begins.

    Fields:
        epoch: passes over the data before it.
        row: rows of the epoch before it.
        samples: samples before it, over all epochs.
        in_epoch: samples of the epoch before it.
        of_rows: what `RowStream` needs to go there; None: the beginning of the data.
    """

    epoch: int = 0
    row: int = 0
    samples: int = 0
    in_epoch: int = 0
    of_rows: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class StreamedDataset:
    """Samples of rows that are read while training.

    Fields:
        rows: the data.
        tokenizer: turns them into samples.
        shuffle_buffer: rows of a block.
        check: of the ids of a block, or None.
        pack: slots of a pack and seed, or None for samples.
    """

    rows: RowStream
    tokenizer: RowTokenizer
    shuffle_buffer: int
    check: Callable[[TokenizedDataset], Any] | None = None
    pack: tuple[int, int] | None = None

    def checked(self, check: Callable[..., Any]) -> StreamedDataset:
        """The same with a check of every block's token ids."""
        return replace(self, check=check)

    @property
    def words(self) -> str:
        """What it reads, in words."""
        blocks = (
            f"{self.shuffle_buffer:,} rows at a time, shuffled{' and packed' * bool(self.pack)}"
        )
        return f"a stream of {self.tokenizer.source}: {blocks}"

    def packed(self, max_seq_len: int, seed: int) -> StreamedDataset:
        """The same with the samples of each block packed; see `PackedDataset`."""
        return replace(self, pack=(max_seq_len, seed))

    def first(self) -> TokenizedDataset:
        """The samples of the first rows. Raises UserError: one of them is wrong."""
        found, _ = self.tokenizer.each(islice(self.rows.after(0, None), LOOKED_AT), 0)
        if self.check is not None:
            self.check(found)
        return found


class BlockReader:
    """Reads and tokenizes blocks; goes to another place only if it has to.

    It runs in a process of its own.
    """

    def __init__(self, stream: StreamedDataset) -> None:
        self._stream = replace(stream, check=None)
        self._rows: Iterator[Mapping[str, Any]] = iter(())
        self._at: Place | None = None

    def __call__(self, place: Place) -> tuple[TokenizedDataset, Counts, Place]:
        """The block at `place`, what became of its rows, and where the next one begins. Raises
        UserError: a row is wrong, or no row of a whole epoch can be used."""
        stream = self._stream
        if place != self._at:
            self._rows = stream.rows.after(place.row, place.of_rows)
        rows = list(islice(self._rows, stream.shuffle_buffer))
        block, counts = stream.tokenizer.each(rows, place.row)
        in_epoch, samples = place.in_epoch + len(block), place.samples + len(block)
        if len(rows) == stream.shuffle_buffer:
            self._at = Place(
                place.epoch, place.row + len(rows), samples, in_epoch, stream.rows.place()
            )
        elif in_epoch:
            self._at = Place(place.epoch + 1, samples=samples)
            self._rows = stream.rows.after(0, None)
        else:
            number = place.row + len(rows)
            last = f" (the last ones: {counts.reasons})" if counts.reasons else ""
            raise UserError(
                f"dataset.source: {stream.tokenizer.source}: none of {number} rows can be used"
                f"{last}; expected at least one usable row"
            )
        return block, counts, self._at


class StreamLoader:
    """This rank's micro-batches of any global step of a `StreamedDataset`; like `StepLoader`.

    Steps are asked for one after the other. Another step than the next one is found from the place
    in a checkpoint, or else from the beginning of the data.

    Attributes:
        dataset: the stream.
        global_batch_size: samples per global step, over all ranks and micro-batches.
        steps_per_epoch: more than any run has; the number of rows is not known.
    """

    steps_per_epoch = NO_END

    def __init__(
        self, dataset: StreamedDataset, *, seed: int, shuffle: bool = True, **shares: Any
    ) -> None:
        """
        Args:
            seed, shuffle: of the order within a block.
            shares: as in `StepLoader`.

        Raises:
            UserError: one of the first rows is wrong.
        """
        empty = None if dataset.pack is None else PackedDataset.empty_pack
        self.dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._shares = Shares(**shares, empty_pack=empty)
        self.global_batch_size = self._shares.global_batch_size
        self._first = dataset.first()
        self._reader = Background(BlockReader(dataset))
        self._progress: dict[str, Any] = {}
        self._asked: list[Place] = []
        self._counts = Counts()
        self._go_to(Place())

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with that of its checkpoint."""
        text = str([self._first[i] for i in range(len(self._first))])
        return {
            "dataset (its length)": "a stream",
            "dataset (its tokens)": hashlib.sha256(text.encode()).hexdigest()[:16],
            "packed": self.dataset.pack is not None,
        }

    def keep_in(self, progress: dict[str, Any]) -> dict[str, Any]:
        """`progress`, the numbers that a checkpoint keeps, in which the place is from now on."""
        self._progress = progress
        return progress

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global step `step`, counted from 0. Raises UserError: a row
        is wrong."""
        if step not in (self._next, self._next - 1):
            kept = self._progress.get("stream") or {}
            if kept.get("step") == step:
                self._go_to(Place(**kept["place"]), step, kept["used"])
            elif step < self._next:
                self._go_to(Place())
            while self._next < step:  # without a checkpoint
                self._take()
        if step == self._next:
            self._chosen = self._take()
        return self._shares.of_rank(
            self._chosen, lambda one: one[0][one[1]], lambda one: self._samples(*one)
        )

    def example(self, step: int) -> Batch:
        """A sample of the first rows, whatever the step: going to a step may read much."""
        del step
        return collate([self._first[0]], pad_id=0) if len(self._first) else collate([], pad_id=0)

    def _go_to(self, place: Place, step: int = 0, used: int = 0) -> None:
        self._next, self._place, self._used = step, place, used
        self._items: MapDataset | None = None
        self._order: list[int] = []
        self._base = 0
        self._ask(place)

    def _take(self) -> list[tuple[MapDataset, int, int]]:
        """The items of the next step: dataset, index in it, and the number of its first sample."""
        chosen: list[tuple[MapDataset, int, int]] = []
        while len(chosen) < self.global_batch_size:
            if self._items is None:
                self._open()
            assert self._items is not None
            stop = self._used + self.global_batch_size - len(chosen)
            new = self._order[self._used : stop]
            chosen += [(self._items, index, self._base) for index in new]
            self._used += len(new)
            if self._used == len(self._order):
                self._place, self._used, self._items = self._after, 0, None
        self._next += 1
        place = {"step": self._next, "place": asdict(self._place), "used": self._used}
        self._progress["stream"] = place
        return chosen

    def _open(self) -> None:
        """Makes the block at `_place` the current one, and asks for the one after it."""
        block, counts, after = self._answer()
        if self.dataset.check is not None:
            self.dataset.check(block)
        self._after, self._base = after, self._place.samples
        first = not self._counts.rows
        self._counts.add(counts)
        if first or after.row == 0:  # at the end of an epoch
            source = f"{self.dataset.tokenizer.source} (streamed, so far)"
            self._counts.tell(source, self.dataset.tokenizer.max_seq_len)
        items: Any = block
        if self.dataset.pack is not None:
            items = PackedDataset(block, *self.dataset.pack)
        key = f"{self._seed} stream {self._place.epoch} {self._place.row}"
        size = len(items)
        self._order = shuffled_indices(size, key).tolist() if self._shuffle else [*range(size)]
        self._items = items
        self._ask(after)

    def _ask(self, place: Place) -> None:
        self._asked.append(place)
        self._reader.ask(place)

    def _answer(self) -> tuple[TokenizedDataset, Counts, Place]:
        """The block at `_place`; blocks that were asked for before it are dropped."""
        with long_wait(f"reading and tokenizing {self.dataset.tokenizer.source}"):
            while True:
                block: tuple[TokenizedDataset, Counts, Place] = self._reader.answer()
                moved()
                if self._asked.pop(0) == self._place:
                    return block

    def _samples(self, items: MapDataset, index: int, base: int) -> tuple[int, ...]:
        inner = items.samples(index) if isinstance(items, PackedDataset) else [index]
        return tuple(base + one for one in inner)


Loader = StepLoader | StreamLoader


def step_loader(dataset: Any, **options: Any) -> Loader:
    """The loader of a dataset: a `StepLoader`, or a `StreamLoader` of a stream.

    Args:
        options: as in `StepLoader`.

    Raises:
        UserError: as in both; or no row has a target within `max_seq_len`.
    """
    if isinstance(dataset, StreamedDataset):
        return StreamLoader(dataset, **options)
    check_targets("dataset", getattr(dataset, "dataset", dataset), options.get("max_seq_len"))
    return StepLoader(dataset, **options)


def check_targets(key: str, samples: Any, limit: int | None) -> None:
    """Raises UserError: no row of a tokenized dataset has a target among its first `limit` tokens;
    `key` is its place in the config. Other datasets, and those without rows, are not looked at."""
    counted = isinstance(samples, TokenizedDataset) and limit is not None and len(samples) > 0
    if counted and not any(some.any() for some in samples.have_targets(limit)):
        found = f"none of {len(samples):,} rows has a target within max_seq_len {limit}"
        raise UserError(f"{key}: {found}; expected a larger max_seq_len, or shorter prompts")


def packed(dataset: Any, max_seq_len: int, seed: int) -> PackedDataset | StreamedDataset:
    """Packs the samples of a dataset, or of every block of a stream; see `PackedDataset`."""
    if isinstance(dataset, StreamedDataset):
        return dataset.packed(max_seq_len, seed)
    return PackedDataset(dataset, max_seq_len, seed)
