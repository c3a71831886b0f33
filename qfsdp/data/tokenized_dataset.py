"""Tokenizes all rows of a dataset, once per machine if the tokens can be kept on disk, and
shows how far it is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qfsdp.common.errors import UserError
from qfsdp.common.progress import moved
from qfsdp.common.terminal import is_terminal
from qfsdp.data.files.file_rows import RowStream
from qfsdp.data.files.rows import Row, Rows
from qfsdp.data.reading import current
from qfsdp.data.row_tokenizer import (
    ROWS_AT_ONCE,
    Counts,
    RowTokenizer,
    Sample,
    TokenizedDataset,
    TokenizedRow,
    Unusable,
    one_by_one,
)
from qfsdp.data.stream import StreamedDataset
from qfsdp.data.token_files import (
    Arrays,
    ArrayWriter,
    cache_key,
    locked,
    partial_folder,
    read_arrays,
    warn_not_kept,
)
from qfsdp.data.tokenize_processes import in_order

if TYPE_CHECKING:
    from pathlib import Path


__all__ = ["Sample", "TokenizedDataset", "TokenizedRow", "Unusable", "one_by_one", "tokenize_rows"]


def tokenize_rows(
    rows: Rows,
    source: str,
    tokenize: Callable[[Sequence[Row]], Sequence[TokenizedRow]],
    max_seq_len: int | None = None,
) -> TokenizedDataset:
    """Tokenizes all rows, or finds the tokens in the cache. With `dataset.streaming` it returns a
    `StreamedDataset`, which tokenizes while training. One log line counts the skipped rows
    and those that may be cut, and one the texts that spell special tokens.

    How many processes tokenize, and where the cache lies, says `qfsdp.data.reading`. The samples
    and their order do not depend on it.

    Args:
        rows: of `load_rows`.
        source: of the rows, for messages.
        tokenize: returns what becomes of each of some rows.
        max_seq_len: samples of this length are counted as possibly cut.

    Raises:
        UserError: no row can be used, or `tokenize` returns a UserError. The message names the row.
    """
    how = current()
    work = RowTokenizer(source, tokenize, max_seq_len)
    if isinstance(rows, RowStream):
        stream: Any = StreamedDataset(rows, work, how.shuffle_buffer)
        return stream  # type: ignore[no-any-return]  # `step_loader` knows it
    cache = how.cache_folder
    if cache is None:
        dataset, counts = _tokenize_into(None, rows, work)
    else:
        folder = cache / cache_key(how.builder, how.tokenizer, rows, source)
        dataset, counts = _cached(folder, rows, work)
    counts.tell(source, max_seq_len)
    return dataset


def _cached(folder: Path, rows: Rows, work: RowTokenizer) -> tuple[TokenizedDataset, Counts]:
    """The dataset in `folder`, which the first process that comes here makes."""
    found = read_arrays(folder)
    if found is None:
        try:
            with locked(folder, work.source):
                found = read_arrays(folder, tell=True)  # another process may have made it
                if found is None:
                    return _tokenize_into(folder, rows, work)
        except OSError as error:
            warn_not_kept(folder.parent, error)
            return _tokenize_into(None, rows, work)
    arrays, summary = found
    counts = Counts(**summary)
    return _with_id_range(arrays, counts), counts


def _with_id_range(arrays: Arrays, counts: Counts) -> TokenizedDataset:
    dataset = TokenizedDataset(**arrays)
    dataset.id_range = (counts.smallest_id, counts.largest_id)
    return dataset


def _tokenize_into(
    folder: Path | None, rows: Rows, work: RowTokenizer
) -> tuple[TokenizedDataset, Counts]:
    """Tokenizes all rows into the cache's `folder`, or into memory (None)."""
    how, counts = current(), Counts()
    writer = ArrayWriter(folder and partial_folder(folder), warn_not_kept)
    pieces = in_order(
        partial(work, rows), len(rows), ROWS_AT_ONCE, how.most_processes, how.processes is not None
    )
    try:
        with RowProgress(f"tokenizing {work.source}", len(rows)) as progress:
            for part, found in pieces:
                ends = np.asarray(part.ends) + counts.tokens
                writer.append(
                    {
                        "tokens": part.tokens.tobytes(),
                        "labels": part.labels.tobytes(),
                        "ends": ends.astype(np.int64).tobytes(),
                    }
                )
                counts.add(found)
                progress.advance(found.rows)
                moved()
        if not counts.rows:
            raise UserError(f"dataset.split: no row of {work.source}; expected a larger part")
        if not counts.samples:
            raise UserError(
                f"dataset.source: {work.source}: none of {len(rows)} rows can be used: "
                f"{counts.reasons or 'no row'}; expected at least one usable row"
            )
        return _with_id_range(writer.finish(vars(counts), folder), counts), counts
    except BaseException:
        writer.discard()
        raise


EVERY_S = 5.0


class RowProgress:
    """Rows done, rows per second and the time that is left, on stderr.

    Work that takes less than two seconds shows nothing. Only the rank that does the work uses it.
    """

    def __init__(self, text: str, total: int) -> None:
        self._text, self._total, self._done = text, total, 0
        self._began = self._said = time.monotonic()
        self._bar: Any = None
        local = os.environ.get("LOCAL_RANK", "0")
        self._words = text if local == "0" else f"local rank {local}: {text}"

    def __enter__(self) -> RowProgress:
        if is_terminal():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._words, total=self._total, unit=" rows", delay=2, leave=False
            )
        return self

    def advance(self, rows: int) -> None:
        """Counts rows that are done."""
        self._done += rows
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(rows)
        elif now - self._said > EVERY_S:
            self._said = now
            rate = self._done / (now - self._began)
            left = (self._total - self._done) / rate
            print(
                f"{self._words}: {self._done:,} of {self._total:,} rows, {rate:,.0f} rows/s, "
                f"{left:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
