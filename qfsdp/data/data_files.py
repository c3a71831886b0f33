"""What is wrong with a data file: its line, what stands there, and what was expected.

`check_beginning` reads a megabyte and finds a file of another kind before anything is loaded.
`check_whole` reads everything. It is called where the `datasets` library has failed, whose message
names neither line nor value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError
from qfsdp.data.csv_files import check_csv_beginning
from qfsdp.data.json_lines import MAX_LINE, decoded, json_values, parsed

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SUFFIXES |= {".tsv": "csv", ".txt": "text"}
"""File suffix -> name of its reader in the `datasets` library. All but Parquet may end in .gz.

A .txt file is one row with one column, "text".
"""

BEGINNING = 2**20
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
GZIP = b"\x1f\x8b"
KINDS = {bool: "a bool", int: "a number", float: "a number", str: "text", list: "a list"}


def suffix_of(file: Path) -> str:
    """The suffix of a data file, also before .gz."""
    return file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix


def check_beginning(file: Path) -> None:
    """Checks the first megabyte of a data file.

    Raises:
        UserError: it is binary, not UTF-8, or does not begin with a JSON object or a list of them.
    """
    with file.open("rb") as stream:
        data = stream.read(BEGINNING)
    if file.suffix == ".parquet":
        if not data.startswith(b"PAR1"):
            raise UserError(f"{file}: begins with {data[:4]!r}; expected a Parquet file (b'PAR1')")
        return
    if data.startswith(GZIP):
        return  # `datasets` reads it
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            raise UserError(f"{file}: {encoding}; expected UTF-8 text")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise UserError(f"{file}, line {line}: a NUL byte, so it is no text; expected UTF-8 text")
    is_whole = len(data) < BEGINNING
    # The last character may be cut; a line that is not whole is not parsed.
    end = len(data) if is_whole else data.rfind(b"\n") + 1
    text = decoded(file, data[:end])
    if data and is_whole and not text.strip():
        raise UserError(f"{file}: only blank lines; expected at least one row")
    if file.suffix == ".jsonl" and not is_whole and not end:
        next(json_values(file))  # a line longer than a megabyte, if not longer than MAX_LINE
    elif file.suffix in (".jsonl", ".json"):
        _check_json_beginning(file, text)
    elif file.suffix in (".csv", ".tsv"):
        check_csv_beginning(file, text, is_whole)


def _check_json_beginning(file: Path, text: str) -> None:
    stripped = text.lstrip()
    line = text.count("\n", 0, len(text) - len(stripped)) + 1
    if stripped.startswith("["):  # a list of rows, over several lines or not
        inner = stripped[1:].lstrip()
        if inner[:1] not in ("{", ""):
            found = inner.splitlines()[0][:40]
            raise UserError(f"{file}, line {line}: a list of {found!r}; expected JSON objects")
        return
    first = stripped.partition("\n")[0]
    if first and (file.suffix == ".jsonl" or not first.startswith("{")):
        _check_object(file, line, parsed(file, first, line))


def check_whole(file: Path) -> None:
    """Finds the first line of a data file that cannot be read.

    Raises:
        UserError: a line is not UTF-8; or, in JSON, is not an object, has a key twice, or a column
            has values of several kinds.
    """
    if file.suffix in (".parquet", ".arrow", ".gz"):
        return
    if file.suffix not in (".jsonl", ".json"):
        with file.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE), b""), start=1):
                decoded(file, line, number)
        return
    with file.open("rb") as stream:
        is_list = stream.read(BEGINNING).lstrip().startswith((b"[", b"\xef\xbb\xbf["))
    if is_list:
        parsed(file, decoded(file, file.read_bytes()))
        return
    for number, row in json_values(file):
        _check_object(file, number, row)


def _check_object(file: Path, line: int, row: Any) -> None:
    if not isinstance(row, Mapping):
        kind = KINDS.get(type(row), "null")
        raise UserError(
            f"{file}, line {line}: {kind}: {str(row)[:40]!r}; expected a JSON object per line"
        )
