"""The rows of one data file, one after the other from any place on, without guessing types.

A place is a byte in the file (of the text inside, if the file ends in .gz), or the number of a row
in Parquet. Rows are read twice where they are counted first, but parsed only when they are used.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, cast

from qfsdp.common.errors import UserError
from qfsdp.data.files.json_lines import MAX_LINE, OddValue, decoded, parsed, value_at, value_of

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SUFFIXES |= {".tsv": "csv", ".txt": "text"}
"""File suffix, in small letters -> kind. All but Parquet may end in .gz.

A .txt file is one row with one column, "text".
"""

BEGINNING = 2**20
KINDS = {bool: "a bool", int: "a number", float: "a number", str: "text", list: "a list"}
SEPARATORS = ",;\t|"
MOST_CHARACTERS = 2**28  # of one cell of a CSV file
_GAP = re.compile(r"[ \t\r\n]*")
_AFTER = re.compile(r"[ \t\r\n]*([,\]]?)")


def suffix_of(file: Path) -> str:
    """The suffix of a data file in small letters, also before .gz; .jsonl for .ndjson."""
    suffix = (file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix).lower()
    return ".jsonl" if suffix == ".ndjson" else suffix


class Records(Protocol):
    """The rows of a file.

    `read(at)` yields the place of each row from place `at` on, the place after it, and its content;
    `value` makes a dictionary of the content. 0 is the place of the first row.
    """

    file: Path

    def read(self, at: int) -> Iterator[tuple[int, int, Any]]: ...

    def value(self, content: Any, at: int, /) -> dict[str, Any]: ...


def records_of(file: Path) -> Records:
    """The rows of a data file, by its suffix and, for JSON, by how it begins. Raises UserError: a
    CSV file has no header."""
    kind = SUFFIXES[suffix_of(file)]
    if kind == "parquet":
        from qfsdp.data.files.parquet_files import ParquetRecords

        return ParquetRecords(file)
    if kind == "csv":
        return CsvRecords(file)
    if kind == "text":
        return TextRecord(file)
    with opened(file) as stream:
        text = stream.read(BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        return JsonValues(file, is_list=True)
    if suffix_of(file) == ".json" and not _is_json(text.partition(b"\n")[0]):
        return JsonValues(file, is_list=False)  # objects over several lines
    return JsonLines(file)


def opened(file: Path) -> IO[bytes]:
    """A data file, uncompressed."""
    if file.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    return file.open("rb")


def line_of(file: Path, at: int) -> int:
    """The number of the line in which a byte of a file lies."""
    line = 1
    with opened(file) as stream:
        while at > 0 and (data := stream.read(min(at, BEGINNING))):
            line += data.count(b"\n")
            at -= len(data)
    return line


def check_object(file: Path, line: int, row: Any) -> None:
    if not isinstance(row, Mapping):
        kind = KINDS.get(type(row), "null")
        raise UserError(
            f"{file}, line {line}: {kind}: {str(row)[:40]!r}; expected a JSON object per line"
        )


def check_whole(file: Path) -> None:
    """Finds the first line of a CSV or text file that is not UTF-8. Raises UserError: there is
    one."""
    if file.suffix in (".parquet", ".arrow", ".gz"):
        return
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE), b""), start=1):
            decoded(file, line, number)


class JsonLines:
    """A JSON object per line. Blank lines are no rows."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self, at: int) -> Iterator[tuple[int, int, bytes]]:
        with opened(self.file) as stream:
            at = _go_to(stream, at)
            for line in iter(partial(stream.readline, MAX_LINE + 1), b""):
                begin, at = at, at + len(line)
                if len(line) > MAX_LINE:
                    raise UserError(
                        f"{self.file}, line {line_of(self.file, begin)}: longer than "
                        f"{MAX_LINE >> 20} MiB; expected one JSON object per line"
                    )
                if not line.isspace():
                    yield begin, at, line

    def value(self, content: bytes, at: int) -> dict[str, Any]:
        try:
            found = value_of(content.decode())
        except (ValueError, RecursionError):
            number = line_of(self.file, at)
            parsed(self.file, decoded(self.file, content, number).strip(), number)
            raise
        if not isinstance(found, dict):
            check_object(self.file, line_of(self.file, at), found)
        return found  # type: ignore[no-any-return]


class JsonValues:
    """A list of JSON objects, or objects one after the other, over any number of lines."""

    def __init__(self, file: Path, is_list: bool) -> None:
        self.file, self._is_list = file, is_list

    def read(self, at: int) -> Iterator[tuple[int, int, Any]]:
        with opened(self.file) as stream:
            place = _go_to(stream, at)
            if self._is_list and not at:
                while stream.read(1) != b"[":
                    place += 1
                place += 1
            yield from self._values(stream, place, is_start=not at)

    def _values(
        self, stream: IO[bytes], place: int, is_start: bool
    ) -> Iterator[tuple[int, int, Any]]:
        """The values from here on.

        Args:
            stream: at byte `place` of the file.
            is_start: nothing but the bracket of the list comes before.
        """
        decode = codecs.getincrementaldecoder("utf-8")().decode
        text, start, size, is_whole, first = "", 0, BEGINNING, False, place
        while True:
            begin = start + len(_GAP.match(text, start)[0])  # type: ignore[index]
            if begin == len(text) and is_whole and not (self._is_list and place > first):
                return
            try:
                if self._is_list and is_start and text.startswith("]", begin):
                    return self._check_end(text[begin + 1 :], stream)
                value, end = value_at(text, begin)
                after = _AFTER.match(text, end)
                assert after is not None
                if after.end() == len(text) and not (is_whole or after[1]):
                    raise ValueError("the rest may come")
            except (OddValue, RecursionError):
                raise self._wrong(place) from None
            except ValueError:
                if is_whole:
                    raise self._wrong(place) from None
                try:
                    data = stream.read(size)
                    text, start = text[start:] + decode(data, not data), 0
                except UnicodeDecodeError:
                    raise self._wrong(place) from None
                is_whole, size = not data, 2 * size
                continue
            at, place = place + begin - start, place + len(text[start : after.end()].encode())
            if self._is_list != bool(after[1]) or not isinstance(value, dict):
                raise self._wrong(at, value)
            start, size, is_start = after.end(), BEGINNING, False
            yield at, place, value
            if after[1] == "]":
                return self._check_end(text[start:], stream)

    def value(self, content: Any, _at: int) -> dict[str, Any]:
        return content  # type: ignore[no-any-return]

    def _check_end(self, text: str, stream: IO[bytes]) -> None:
        if text.strip() or stream.read().strip():
            raise self._wrong(0)

    def _wrong(self, at: int, value: Any = None) -> UserError:
        """What is wrong in the file from a place on, with its line."""
        line = line_of(self.file, at)
        try:
            if value is not None and not isinstance(value, dict):
                check_object(self.file, line, value)
            with opened(self.file) as stream:
                stream.seek(0 if self._is_list else at)
                text = decoded(self.file, stream.read(), 1 if self._is_list else line)
            if self._is_list:
                parsed(self.file, text)
            value_at(text, len(text) - len(text.lstrip()))
            reason = "text between objects"
        except json.JSONDecodeError as error:
            line, reason = line + error.lineno - 1, error.msg
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, OddValue) else "too many nested brackets"
        except UserError as error:
            return error
        where = f"{self.file}, line {line}"
        return UserError(f"{where}: not valid JSON: {reason}; expected a JSON object")


class CsvRecords:
    """Rows of a CSV file: column -> text, as it stands. Columns without a cell are left out.

    Nothing is guessed: pandas takes 01234 for a number, NA and null for nothing.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with opened(file) as stream:
            place = _go_to(stream, 0)
            text = stream.read(2**16).decode(errors="replace")
        self._separator = separator_of(text)
        header = next(self._read(place), None)
        if header is None:
            raise UserError(f"{file}: no header; expected a line with the names of columns")
        _, self._begin, cells = header
        self.names = header_of(cells)

    def read(self, at: int) -> Iterator[tuple[int, int, list[str]]]:
        return self._read(at or self._begin)

    def value(self, content: list[str], at: int) -> dict[str, Any]:
        if len(content) > len(self.names):
            where = f"{self.file}, line {line_of(self.file, at)}"
            raise UserError(
                f"{where}: {len(content)} cells, and the header has {len(self.names)}; expected "
                f'"quotes" around text with {self._separator!r} in it'
            )
        return dict(zip(self.names, content, strict=False))

    def _read(self, at: int) -> Iterator[tuple[int, int, list[str]]]:
        csv.field_size_limit(MOST_CHARACTERS)
        after, lines = at, list[str]()
        with opened(self.file) as stream:
            stream.seek(at)
            wrapped = io.TextIOWrapper(stream, "utf-8", newline="")

            def each() -> Iterator[str]:
                nonlocal after
                for line in iter(partial(wrapped.readline, MOST_CHARACTERS), ""):
                    after += len(line) if line.isascii() else len(line.encode())
                    lines.append(line)
                    yield line

            try:
                for cells in csv.reader(each(), delimiter=self._separator):
                    begin, at = at, after
                    last, lines = lines, []
                    if cells and (len(cells) > 1 or cells[0].strip() or '"' in last[0]):
                        self._check_quotes(last, begin)
                        yield begin, after, cells
            except UnicodeDecodeError:
                check_whole(self.file)
                raise
            except csv.Error as error:
                line = line_of(self.file, at)
                raise UserError(f"{self.file}, line {line}: {error}; expected CSV") from None

    def _check_quotes(self, lines: list[str], at: int) -> None:
        """Raises UserError if the row has a quote that is not closed, so it swallows other rows."""
        if len(lines) == 1 and not lines[0].count('"') % 2:
            return
        try:
            list(csv.reader(lines, delimiter=self._separator, strict=True))
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise UserError(
                    f"{self.file}, line {line_of(self.file, at)}: a quote that is not closed; "
                    'expected "quotes" around a cell, and "" for a quote in it'
                ) from None


def separator_of(text: str) -> str:
    """The one of `SEPARATORS` that the first line has most of, outside of quotes."""
    outside = "".join(text.lstrip().partition("\n")[0].split('"')[::2])
    return max(SEPARATORS, key=outside.count)


def header_of(cells: list[str]) -> list[str]:
    """The columns as pandas calls them: one without a name by its place, equal ones numbered."""
    names: list[str] = []
    for place, name in enumerate(cells):
        name, count = name or f"Unnamed: {place}", 1
        unique = name
        while unique in names:
            unique, count = f"{name}.{count}", count + 1
        names.append(unique)
    return names


class TextRecord:
    """A text file is one row, with the column "text". Its lines end in \\n."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self, at: int) -> Iterator[tuple[int, int, None]]:
        if not at:
            yield 0, 1, None

    def value(self, _content: Any, _at: int) -> dict[str, Any]:
        with opened(self.file) as stream:
            text = decoded(self.file, stream.read())
        return {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


def _go_to(stream: IO[bytes], at: int) -> int:
    """Goes to a place in a file; from 0 to behind the mark of UTF-8 that some programs write."""
    if at or stream.read(3) != codecs.BOM_UTF8:
        stream.seek(at)
        return at
    return 3


def _is_json(line: bytes) -> bool:
    try:
        value_of(line.decode())
    except (ValueError, RecursionError):
        return False
    return True
