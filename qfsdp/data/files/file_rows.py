"""The rows of data files on this machine: counted first and then read in order, or streamed.

The place of every 64th row in its file is kept, so ten million rows take 1.3 MB in memory. A stream
is read from a place that can be kept and gone back to; `RowStream` reads those of `datasets` too.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.common.files import DAMAGED
from qfsdp.common.messages import first_line
from qfsdp.common.progress import moved
from qfsdp.data.files.file_records import Records, line_of, records_of
from qfsdp.data.files.parquet_files import ParquetRecords

if TYPE_CHECKING:
    from datasets import IterableDataset

EVERY = 64  # rows between places that are kept
LOOKED_AT = 100  # first rows of a file, whose keys are its columns


class FileRow(dict[str, Any]):
    """A row. Keys that it lacks are None, as in a table.

    Attributes:
        file: where it stands.
        at: its place in the file; see `qfsdp.data.files.file_records`.
    """

    __slots__ = ("at", "file")

    def __init__(self, values: Mapping[str, Any], file: Path, at: int) -> None:
        super().__init__(values)
        self.file, self.at = file, at

    def __missing__(self, key: str) -> None:
        return None

    @property
    def line(self) -> int | None:
        """The number of its line, or None if the file has no lines."""
        if self.file.suffix == ".parquet":
            return None
        return line_of(self.file, self.at)


class FilePart:
    """The rows of one file.

    Args:
        file: a data file.

    Attributes:
        count: number of rows.
        columns: keys of its first rows.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.file, self._state = file, file_state(file)
        self._left: tuple[int, Iterator[Any]] | None = None
        self._places = array("q")
        with _reading(file):
            self._records = records_of(file)
            self.count = self._count()
        first = islice(self.rows(0, self.count), LOOKED_AT)
        self.columns = list(dict.fromkeys(key for row in first for key in row))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_left": None}

    def rows(self, start: int, stop: int) -> Iterator[FileRow]:
        """Rows `start` to `stop`, counted from 0. Raises UserError: a row cannot be read, or the
        file has changed."""
        if start >= stop:
            return
        with _reading(self.file):
            number, records = self._from(start)
            for at, _, content in records:
                if number >= start:
                    yield FileRow(self._records.value(content, at), self.file, at)
                number += 1
                if number == stop:
                    break
        # Not at the end of a file: it would stay open, and a folder may have 10,000 of them.
        self._left = (number, records) if number < self.count else None

    def close(self) -> None:
        """Closes the file, which is open where it was read in part."""
        self._left = None

    def has(self, column: str) -> bool:
        """Whether a row has the key; looks at all of them if need be."""
        if column not in self.columns and any(column in row for row in self.rows(0, self.count)):
            self.columns.append(column)
        return column in self.columns

    def _count(self) -> int:
        if isinstance(self._records, ParquetRecords):
            return self._records.count
        count = 0
        for at, _, _ in self._records.read(0):
            if not count % EVERY:
                self._places.append(at)
                moved()
            count += 1
        return count

    def _from(self, start: int) -> tuple[int, Iterator[Any]]:
        """The rows from one on that comes at most `start`, and its number."""
        if file_state(self.file) != self._state:
            raise UserError(f"{self.file}: changed while it was read; expected it to stay")
        left, self._left = self._left, None
        # To go to a place of a .gz reads all that stands before it.
        most = 2**62 if self.file.suffix == ".gz" else EVERY
        if left is not None and 0 <= start - left[0] < most:
            return left
        if isinstance(self._records, ParquetRecords):
            return start, self._records.read(start)
        mark = start // EVERY
        return mark * EVERY, self._records.read(self._places[mark])


class FileRows:
    """The rows of several files, one after the other; see `load_rows`.

    Attributes:
        column_names: keys of the first rows of every file.
    """

    def __init__(self, parts: Sequence[FilePart]) -> None:
        self._parts, self._last = parts, list[FilePart]()  # shared with what is selected
        self._starts = [0, *accumulate(part.count for part in parts)]
        self._spans = [range(self._starts[-1])]
        self.column_names = list(dict.fromkeys(name for part in parts for name in part.columns))

    def __len__(self) -> int:
        return sum(map(len, self._spans))

    def __iter__(self) -> Iterator[FileRow]:
        for span in self._spans:
            at = bisect_right(self._starts, span.start) - 1
            while at < len(self._parts) and self._starts[at] < span.stop:
                first, part = self._starts[at], self._open(at)
                yield from part.rows(max(span.start - first, 0), min(span.stop - first, part.count))
                at += 1

    def _open(self, at: int) -> FilePart:
        """A part to be read. Closes the one that was read before."""
        part = self._parts[at]
        if self._last and self._last[0] is not part:
            self._last[0].close()
        self._last[:] = [part]
        return part

    def select(self, *chosen: range) -> FileRows:
        """Some of the rows: ranges with step 1, one after the other."""
        spans = []
        for wanted in chosen:
            first = 0
            for span in self._spans:
                part = span[max(wanted.start - first, 0) : max(wanted.stop - first, 0)]
                spans += [part] if part else []
                first += len(span)
        found = copy(self)
        found._spans = spans
        return found

    def lacks(self, column: str) -> FilePart | None:
        """The first file none of whose rows has the key; None: every file has it."""
        parts = (part for part in self._parts if part.count and not part.has(column))
        return next(parts, None)


class FileStream:
    """The rows of several files without counting them first, for `RowStream`.

    Args:
        files: data files.
        most: rows to read; None: all.
    """

    def __init__(self, files: Sequence[Path], most: int | None = None) -> None:
        self._files, self._most = list(files), most
        self.load_state_dict({"file": 0, "at": 0, "rows": 0})

    def state_dict(self) -> dict[str, int]:
        """The place after the last row."""
        return dict(self._place)

    def load_state_dict(self, place: Mapping[str, int]) -> None:
        """Goes to a place."""
        self._place = dict(place)

    def __iter__(self) -> Iterator[FileRow]:
        place = self._place
        for number in range(place["file"], len(self._files)):
            file = self._files[number]
            with _reading(file):
                records: Records = records_of(file)
                at = place["at"] if number == place["file"] else 0
                for begin, after, content in records.read(at):
                    if self._most is not None and self._place["rows"] >= self._most:
                        return
                    rows = self._place["rows"] + 1
                    self._place = {"file": number, "at": after, "rows": rows}
                    yield FileRow(records.value(content, begin), file, begin)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """A `with` block that reads a file: what the system says about it becomes a UserError."""
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8; expected UTF-8 text") from None
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{file}: {reason}; expected a file that can be read") from None


def file_state(file: Path) -> tuple[int, int, int, int]:
    """What changes with a file. A program that copies it may set one of the times, not the other.
    Raises UserError: there is no such file."""
    with _reading(file):
        found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class RowStream:
    """The rows of a streamed dataset, in the order of the data.

    Args:
        rows: not shuffled.
        source: of the rows, for messages.

    Attributes:
        column_names: of the first row.

    Raises:
        UserError: there is no row, or the first one cannot be read.
    """

    def __init__(self, rows: IterableDataset | FileStream, source: str) -> None:
        self._rows, self._source = rows, source
        self._start = deepcopy(rows.state_dict())
        first = list(islice(self.after(0, None), 1))
        if not first:
            raise UserError(f"dataset.source: {source} has no rows; expected at least one")
        self.column_names = list(first[0])

    def after(self, number: int, place: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
        """The rows from a place on.

        Args:
            number: rows before that place, for messages.
            place: of an earlier `place()`; None: the beginning. One of another form, from a release
                that read files in another way, is found by reading `number` rows again.

        Raises:
            UserError: a row cannot be read.
        """
        from datasets.exceptions import DatasetsError

        is_known = place is not None and place.keys() == self._start.keys()
        again = number if place and not is_known else 0
        self._rows.load_state_dict(deepcopy(dict(place if place and is_known else self._start)))
        try:
            for row in islice(self._rows, again, None):
                yield row
                number += 1
        except (DatasetsError, ValueError, *DAMAGED) as error:
            where = f"dataset.source: {self._source}, row {number + 1}"
            raise UserError(f"{where}: {first_line(error.__cause__ or error)}") from None

    def place(self) -> dict[str, Any]:
        """The place after the last row that was read: numbers and text, for a checkpoint."""
        return deepcopy(dict(self._rows.state_dict()))
