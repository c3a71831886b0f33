"""Loads the rows of a dataset from a file, a folder of files or the Hugging Face hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.cli.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
"""File suffix -> name of its reader in the `datasets` library.

A .txt file is one row with one column, "text".
"""

Row = Mapping[str, Any]


def check_source(key: str, source: Any) -> None:
    """Checks the source of a dataset without loading it and without using the network.

    A source is a local path if it exists, has a known suffix, starts with `/`, `.` or `~`, or has
    more than one `/`. Any other source is a hub name.

    Args:
        key: the source's place in the config. Messages begin with it.

    Raises:
        UserError: `source` is not text, or is a local path that does not exist, is empty or has an
            unknown suffix.
    """
    expected = f"expected a {', '.join(SUFFIXES)} file, a folder of them or a hub name"
    if not isinstance(source, str):
        raise UserError(f"{key}: {source!r} is not text; {expected}")
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{key}: {source} has the unknown suffix {path.suffix!r}; {expected}")
        if path.stat().st_size == 0:
            raise UserError(f"{key}: {source} is empty; {expected}")
    elif path.is_dir() and source:
        if not any(_data_files(path)):
            raise UserError(f"{key}: {source} holds no data file; {expected}")
    elif path.suffix in SUFFIXES or source[:1] in "/.~" or source.count("/") > 1:
        raise UserError(f"{key}: {source or 'an empty name'} does not exist; {expected}")


def load_rows(
    source: str,
    split: str,
    subset: str | None = None,
    data_files: str | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Loads the rows of `source`.

    Args:
        source: a file, a folder or a hub name; see `check_source`.
        split: as in `datasets.load_dataset`. A file has only "train" and slices of it.
        subset: the configuration of a hub dataset that has several. Files have none.
        data_files: which files of a folder or a hub dataset to read.
        max_rows: keep only the first `max_rows` rows; None keeps all.

    Raises:
        UserError: an argument is wrong or the source cannot be read.
    """
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    if max_rows is not None and max_rows < 1:
        raise UserError(f"dataset.max_rows: {max_rows}; expected an integer of at least 1, or null")
    if source in SUFFIXES.values() and data_files:  # torchtune names files so
        source, data_files = data_files, None
    check_source("dataset.source", source)
    if not sys.stderr.isatty():
        disable_progress_bars()  # every update of a bar is a line in a log file
    path = Path(source).expanduser()
    if path.is_file() and data_files is not None:
        raise UserError(
            f"dataset.data_files: {data_files} together with the single file {source}; "
            "expected a folder or a hub dataset as the source"
        )
    documents = {"sample_by": "document"} if _is_text(path) else {}  # default: a row per line
    try:
        if path.is_file():
            kind = SUFFIXES[path.suffix]
            rows = load_dataset(kind, data_files=str(path), split=split, **documents)
        elif path.is_dir():
            rows = load_dataset(str(path), data_files=data_files, split=split, **documents)
        else:
            rows = load_dataset(source, subset, data_files=data_files, split=split)
    except (DatasetsError, ValueError, OSError) as error:
        for file in _data_files(path) if path.exists() else ():
            if SUFFIXES[file.suffix] == "json":
                _check_json(file)
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"dataset.source: {source}, split {split}: {reason[0]}") from error
    return rows.select(range(min(max_rows or len(rows), len(rows))))


def require_column(key: str, column: str, rows: Dataset, source: str) -> None:
    """Raises UserError unless the rows have the column `column`.

    Args:
        key: the builder's argument that names the column.
        source: of the rows, for the message. The message lists the columns, the most similar
            first.
    """
    if column in rows.column_names:
        return
    nearest = sorted(
        rows.column_names,
        key=lambda name: SequenceMatcher(None, column.lower(), name.lower()).ratio(),
        reverse=True,
    )
    raise UserError(
        f"dataset.{key}: no column {column!r} in {source}; expected one of {', '.join(nearest)}"
    )


def _data_files(path: Path) -> Iterator[Path]:
    """The data files of a folder, or `path` itself if it is a data file."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return (file for file in files if file.suffix in SUFFIXES)


def _is_text(path: Path) -> bool:
    """Whether all data files of a path are .txt files."""
    suffixes = {file.suffix for file in _data_files(path)} if path.exists() else set()
    return suffixes == {".txt"}


def _check_json(file: Path) -> None:
    """Raises UserError with the first line of a .json or .jsonl file that is not JSON."""
    text = file.read_text(encoding="utf-8-sig")
    whole = text.lstrip().startswith("[")
    for number, document in [(1, text)] if whole else enumerate(text.split("\n"), start=1):
        try:
            if document.strip():
                json.loads(document)
        except json.JSONDecodeError as error:
            line = number + error.lineno - 1
            raise UserError(f"{file}, line {line}: not valid JSON: {error.msg}") from error
