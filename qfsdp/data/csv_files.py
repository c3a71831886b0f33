"""CSV and TSV files: every cell is text, as it stands in the file.

pandas, with which `datasets` reads them, takes 01234 for a number, NA, null and None for nothing,
and the first column for names of rows where a row has more cells than the header.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError

SEPARATORS = ",;\t|"
MOST_CHARACTERS = 2**28  # of one cell
_BEGINNING = 2**16  # characters in which the header ends


def csv_options(files: Sequence[Path]) -> dict[str, Any]:
    """What the reader of `datasets` is told about files. Those of a folder have one header."""
    from datasets import Features, Value

    headers = {_header(file) for file in files}
    separator, names = next(iter(headers))
    options = {"sep": separator, "keep_default_na": False}
    if len(headers) == 1:  # else `datasets` says which file has other columns
        options["features"] = Features({name: Value("string") for name in names})
    return options


def _header(file: Path) -> tuple[str, tuple[str, ...]]:
    """The separator and the columns of a file."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8-sig", newline="") as stream:
        text = stream.read(_BEGINNING)
    separator = separator_of(text)
    _, cells = next(_records(text, separator), (1, []))
    return separator, tuple(_names(cells))


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
            raise UserError(
                f"{file}, line {line}: {len(cells)} cells, and the header has {width}; expected "
                f'"quotes" around text with {separator!r} in it'
            )


def _records(text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The number of its last line, and the cells, of every row that is not blank."""
    csv.field_size_limit(MOST_CHARACTERS)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    return ((reader.line_num, cells) for cells in reader if cells)


def _names(header: list[str]) -> list[str]:
    """The columns as pandas calls them: one without a name by its place, equal ones numbered."""
    names: list[str] = []
    for place, name in enumerate(header):
        name, count = name or f"Unnamed: {place}", 1
        unique = name
        while unique in names:
            unique, count = f"{name}.{count}", count + 1
        names.append(unique)
    return names
