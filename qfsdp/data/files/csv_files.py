"""CSV and TSV files: their separator and header, and rows with more cells than the header.

Every cell is text, as it stands in the file. (pandas takes 01234 for a number, NA and null for
nothing.) `qfsdp.data.files.file_records` reads the rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from qfsdp.common.errors import UserError

SEPARATORS = ",;\t|"
MOST_CHARACTERS = 2**28  # of one cell


def separator_of(text: str) -> str:
    """The one of `SEPARATORS` that the first line has most of, outside of quotes."""
    outside = "".join(text.lstrip().partition("\n")[0].split('"')[::2])
    return max(SEPARATORS, key=outside.count)


def check_csv_beginning(file: Path, text: str, is_whole: bool) -> None:
    """Checks that no row at the beginning of a file has more cells than the header.

    Args:
        text: the first lines.
        is_whole: the file has no others, so the last row is not cut.
    """
    separator = separator_of(text)
    records = list(_records(text, separator))
    for line, cells in records if is_whole else records[:-1]:
        width = len(records[0][1])
        if len(cells) > width:
            raise too_many_cells(file, line, len(cells), width, separator)


def too_many_cells(file: Path, line: int, cells: int, width: int, separator: str) -> UserError:
    """That a row has more cells than the header."""
    return UserError(
        f'{file}, line {line}: {cells} cells, and the header has {width}; expected "quotes" '
        f"around text with {separator!r} in it"
    )


def _records(text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The number of its last line, and the cells, of every row that is not blank."""
    csv.field_size_limit(MOST_CHARACTERS)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    return ((reader.line_num, cells) for cells in reader if cells)


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
