"""Turns rows into a dataset of tokens and labels."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qfsdp.cli.errors import UserError
from qfsdp.data.rows import Row

if TYPE_CHECKING:
    from datasets import Dataset

Sample = tuple[list[int], list[int]]
"""Tokens and labels of equal length. Labels are -100 where not trained, and *not* shifted."""

log = logging.getLogger("qfsdp")


class TokenizedDataset:
    """Samples in flat arrays: 8 bytes per token. Lists of Python ints take over 60.

    Fields:
        tokens: int32 `[total]`, all samples one after the other.
        labels: int32 `[total]`, the token or -100.
        ends: int64 `[samples]`, the end of each sample in `tokens`.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.labels = array("i")
        self.ends = array("q")

    def append(self, tokens: list[int], labels: list[int]) -> None:
        """Add one sample."""
        self.tokens.extend(tokens)
        self.labels.extend(labels)
        self.ends.append(len(self.tokens))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [end - start for start, end in zip([0, *self.ends], self.ends, strict=False)]

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        index = range(len(self))[index]  # negative indices, and IndexError
        chosen = slice(self.ends[index - 1] if index else 0, self.ends[index])
        return {"tokens": self.tokens[chosen].tolist(), "labels": self.labels[chosen].tolist()}


class Unusable(Exception):
    """A row that cannot be trained on. The message says why."""


def tokenize_rows(
    rows: Dataset,
    source: str,
    samples_of: Callable[[Row], Iterable[Sample]],
    max_seq_len: int | None = None,
) -> TokenizedDataset:
    """Tokenizes all rows. One log line counts the skipped rows and those that may be cut.

    Args:
        source: of the rows, for messages.
        samples_of: returns the samples of a row. Raises `Unusable` to skip the row.
        max_seq_len: samples of this length are counted as possibly cut.

    Raises:
        UserError: no row can be used, or `samples_of` raises UserError or ValueError. The message
            names the row.
    """
    dataset = TokenizedDataset()
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        try:
            for tokens, labels in list(samples_of(row)):
                dataset.append(tokens, labels)
        except Unusable as reason:
            left_out[str(reason)] += 1
        except (UserError, ValueError) as error:  # torchtune's chat templates raise ValueError
            raise UserError(f"dataset.source: {source}, row {number}: {error}") from error
    reasons = ", ".join(f"{count} with {reason}" for reason, count in left_out.items())
    if not len(dataset):
        raise UserError(
            f"dataset.source: {source}: none of {len(rows)} rows can be used: "
            f"{reasons or 'no row'}; expected at least one usable row"
        )
    full = sum(length == max_seq_len for length in dataset.lengths)
    log.log(
        logging.WARNING if left_out or full else logging.INFO,
        "%s: %d of %d rows used, %d samples, %d tokens%s%s",
        source,
        len(rows) - left_out.total(),
        len(rows),
        len(dataset),
        len(dataset.tokens),
        f"; left out: {reasons}" if reasons else "",
        f"; {full} reach max_seq_len {max_seq_len} and may be cut" if full else "",
    )
    return dataset
