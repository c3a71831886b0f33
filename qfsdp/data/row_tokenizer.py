"""Turns rows into tokens and labels, and counts what became of them."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from qfsdp.common.errors import UserError, speaks_for_all
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.data.chat.special_tokens import texts_of
from qfsdp.data.encode import TooSlow, naming
from qfsdp.data.files.rows import Row, Rows, read_each, where

Sample = tuple[list[int], list[int]]
"""Tokens and labels of equal length. Labels are -100 where not trained, and *not* shifted."""

ROWS_AT_ONCE = 128  # of one piece of work; also how often the bar moves
SAMPLES_AT_ONCE = 4096  # whose targets are looked for

log = logging.getLogger("qfsdp")


class TokenizedDataset:
    """Samples in flat arrays: 8 bytes per token. Lists of Python ints take over 60.

    Fields:
        tokens: int32 `[total]`, all samples one after the other.
        labels: int32 `[total]`, the token or -100.
        ends: int64 `[samples]`, the end of each sample in `tokens`.
        id_range: bounds of all tokens if they are known, else None.

    The arrays are in memory, or files mapped into it (`qfsdp.data.token_files`).
    """

    def __init__(self, tokens: Any = None, labels: Any = None, ends: Any = None) -> None:
        self.tokens: Any = array("i") if tokens is None else tokens
        self.labels: Any = array("i") if labels is None else labels
        self.ends: Any = array("q") if ends is None else ends
        self.id_range: tuple[int, int] | None = None

    def append(self, tokens: Iterable[int], labels: Iterable[int]) -> None:
        """Add one sample; only to arrays in memory."""
        self.tokens.extend(tokens)
        self.labels.extend(labels)
        self.ends.append(len(self.tokens))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        lengths: list[int] = np.diff(np.asarray(self.ends), prepend=0).tolist()
        return lengths

    def have_targets(self, max_seq_len: int) -> Iterator[Any]:
        """Whether each sample has a target within `max_seq_len`: bool arrays, of some samples each.

        A long prompt leaves none. The first token is never a target, as nothing predicts it.
        """
        ends = np.asarray(self.ends)
        begins = np.concatenate([[0], ends[:-1]])
        for first in range(0, len(ends), SAMPLES_AT_ONCE):
            some = slice(first, first + SAMPLES_AT_ONCE)
            begin, end = begins[some], ends[some]
            labels = np.asarray(self.labels[int(begin[0]) : int(end[-1])])
            counts = np.concatenate([[0], np.cumsum(labels != IGNORE_INDEX)])
            last = np.minimum(end, begin + max_seq_len) - begin[0]
            yield counts[last] > counts[np.minimum(begin - begin[0] + 1, last)]

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        index = range(len(self))[index]  # negative indices, and IndexError
        chosen = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return {"tokens": self.tokens[chosen].tolist(), "labels": self.labels[chosen].tolist()}


class Unusable(Exception):
    """A row that cannot be trained on. The message says why."""


@dataclass(frozen=True)
class TokenizedRow:
    """What became of a row.

    Fields:
        samples: tokens and labels.
        problem: why it has no samples: `Unusable` skips the row, UserError ends the run.
        spelled: the first special token that its text spells and what became of it, or None.
        remark: what a user must know of how the row is trained, or None.
    """

    samples: Sequence[Sample] = ()
    problem: Unusable | UserError | None = None
    spelled: str | None = None
    remark: str | None = None


def one_by_one(
    samples_of: Callable[[Row], Iterable[Sample]], tokenizer: Any = None
) -> Callable[[Sequence[Row]], list[TokenizedRow]]:
    """The `tokenize` of `tokenize_rows` for a function of a single row.

    Args:
        samples_of: returns the samples of a row. Raises `Unusable` or UserError.
        tokenizer: the one that `samples_of` uses. `HFTokenizer` notes special tokens in texts.
    """
    notes: list[str] = getattr(tokenizer, "spelled", [])

    def tokenize(rows: Sequence[Row]) -> list[TokenizedRow]:
        found: list[TokenizedRow] = []
        for row in rows:
            before = len(notes)
            try:
                samples = list(samples_of(row))
            except TooSlow as problem:  # other rows may be as slow
                return found + [TokenizedRow(problem=problem)] * (len(rows) - len(found))
            except (Unusable, UserError) as problem:
                found.append(TokenizedRow(problem=problem))
            except ValueError as error:  # of torchtune's tokenizers
                found.append(TokenizedRow(problem=UserError(str(error))))
            else:
                found.append(TokenizedRow(samples, None, *notes[before : before + 1]))
        return found

    return tokenize


@dataclass
class Counts:
    """What became of the rows.

    Fields:
        rows, samples, tokens: how many.
        full: samples that reach `max_seq_len` and may be cut.
        left_out: reason -> rows that are not used.
        spelled: texts that spell a special token; `spelled_first` is the first, in `spelled_row`.
        remarks: what a user must know -> the first row that it is about.
        smallest_id, largest_id: at least 0 and at most 0 if there is no token.
    """

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    full: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    spelled: int = 0
    spelled_row: int = 0
    spelled_first: str = ""
    remarks: dict[str, int] = field(default_factory=dict)
    smallest_id: int = 0
    largest_id: int = 0

    @property
    def reasons(self) -> str:
        """Why rows are left out, with their numbers."""
        return ", ".join(f"{count} with {reason}" for reason, count in self.left_out.items())

    def tell(self, source: str, max_seq_len: int | None) -> None:
        """Logs what became of the rows; rank 0 says it for all."""
        if not speaks_for_all():
            return
        left_out = sum(self.left_out.values())
        cut = f"; {self.full} reach max_seq_len {max_seq_len} and may be cut"
        log.log(
            logging.WARNING if left_out or self.full else logging.INFO,
            "%s: %d of %d rows used, %d samples, %d tokens%s%s",
            source,
            self.rows - left_out,
            self.rows,
            self.samples,
            self.tokens,
            f"; left out: {self.reasons}" if left_out else "",
            cut if self.full else "",
        )
        if self.spelled:
            text = "%s: %d texts spell special tokens, first in row %d: %s"
            log.warning(text, source, self.spelled, self.spelled_row, self.spelled_first)
        for remark, row in self.remarks.items():
            log.warning("%s: row %d: %s", source, row, remark)

    def add(self, other: Counts) -> None:
        """Adds the counts of rows that come after these."""
        for name in ("rows", "samples", "tokens", "full"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.left_out = dict(Counter(self.left_out) + Counter(other.left_out))
        if not self.spelled:
            self.spelled_row, self.spelled_first = other.spelled_row, other.spelled_first
        self.spelled += other.spelled
        self.remarks = other.remarks | self.remarks
        self.smallest_id = min(self.smallest_id, other.smallest_id)
        self.largest_id = max(self.largest_id, other.largest_id)


@dataclass(frozen=True)
class RowTokenizer:
    """Tokenizes a range of rows, in whichever process it is called.

    Fields: as the arguments of `tokenize_rows`.
    """

    source: str
    tokenize: Callable[[Sequence[Row]], Sequence[TokenizedRow]]
    max_seq_len: int | None

    def __call__(self, rows: Rows, start: int, stop: int) -> tuple[TokenizedDataset, Counts]:
        """Tokenizes rows `start` to `stop`, counted from 0."""
        part = rows if start == 0 and stop == len(rows) else rows.select(range(start, stop))
        return self.each(part, start)

    def each(self, rows: Iterable[Row], start: int) -> tuple[TokenizedDataset, Counts]:
        """Tokenizes rows, the first of which has the number `start`, counted from 0. Raises
        UserError: a row is wrong. The message names it."""
        dataset, counts = TokenizedDataset(), Counts()
        left_out: Counter[str] = Counter()
        each = enumerate(read_each(rows, self.source), start=start + 1)
        while batch := list(islice(each, ROWS_AT_ONCE)):
            with naming(partial(self._where, batch)):
                tokenized = self.tokenize([row for _, row in batch])
            for (number, row), found in zip(batch, tokenized, strict=True):
                if isinstance(found.problem, UserError):
                    place = where(self.source, number, row)
                    raise UserError(f"{place}: {found.problem}") from found.problem
                if found.problem is not None:
                    left_out[str(found.problem)] += 1
                if found.spelled is not None:
                    counts.spelled += 1
                    if counts.spelled == 1:
                        counts.spelled_row, counts.spelled_first = number, found.spelled
                if found.remark is not None:
                    counts.remarks.setdefault(found.remark, number)
                for tokens, labels in found.samples:
                    dataset.append(tokens, labels)
                    counts.full += len(tokens) == self.max_seq_len
            counts.rows += len(batch)
        counts.samples, counts.tokens = len(dataset), len(dataset.tokens)
        counts.left_out = dict(left_out)
        counts.smallest_id = min(dataset.tokens, default=0)
        counts.largest_id = max(dataset.tokens, default=0)
        return dataset, counts

    def _where(self, batch: Sequence[tuple[int, Row]], text: str) -> str:
        """Where the row stands that a text was made of: the first one whose longest text it has."""
        for number, row in batch:
            longest = max(texts_of(list(row.values())), key=len, default="").strip()
            if longest and longest in text:
                return where(self.source, number, row)
        return f"{self.source}, rows {batch[0][0]} to {batch[-1][0]}"
