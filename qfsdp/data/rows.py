"""Where rows come from: a file, a folder of files, or a dataset of the Hugging Face hub."""

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
"""Suffix -> who reads it in `datasets`. A .txt file is one row, with the one column "text"."""

Row = Mapping[str, Any]


def check_source(key: str, source: Any) -> None:
    """Find what is wrong with a dataset's source without loading it or using the network.

    What has a known suffix, starts with `/`, `.` or `~`, or has more than one `/` is taken for a
    local path; the rest, where no such file exists, for a hub name.

    Raises:
        UserError: in one line that starts with `key`: `source` is no text, or a local path does
            not exist, is empty, or is not of a known kind.
    """
    right = f"a {', '.join(SUFFIXES)} file, a folder of them or a hub name is right"
    if not isinstance(source, str):
        raise UserError(f"{key}: {source!r} is not text; {right}")
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{key}: {source} has the unknown suffix {path.suffix!r}; {right}")
        if path.stat().st_size == 0:
            raise UserError(f"{key}: {source} is empty; {right}")
    elif path.is_dir() and source:
        if not any(_data_files(path)):
            raise UserError(f"{key}: {source} holds no data file; {right}")
    elif path.suffix in SUFFIXES or source[:1] in "/.~" or source.count("/") > 1:
        raise UserError(f"{key}: {source or 'an empty name'} does not exist; {right}")


def load_rows(
    source: str,
    split: str,
    subset: str | None = None,
    data_files: str | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """The rows of `source`.

    Args:
        source: a file, a folder or a hub name; see `check_source`.
        split: as in `datasets.load_dataset`; a file has only "train" and slices of it.
        subset: the configuration of a hub dataset that has several; files have none.
        data_files: which files of a folder or hub dataset.
        max_rows: the first so many only.

    Raises:
        UserError: whatever a user can get wrong with these.
    """
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    if max_rows is not None and max_rows < 1:
        raise UserError(f"dataset.max_rows: {max_rows}; at least 1, or null for all, is right")
    if source in SUFFIXES.values() and data_files:  # torchtune's way to name a local file
        source, data_files = data_files, None
    check_source("dataset.source", source)
    if not sys.stderr.isatty():
        disable_progress_bars()  # in a log file every update of a bar is a line
    path = Path(source).expanduser()
    if path.is_file() and data_files is not None:
        raise UserError(
            f"dataset.data_files: {data_files} beside the single file {source}; "
            "only a folder or a hub dataset has data files to choose from"
        )
    documents = {"sample_by": "document"} if _is_text(path) else {}  # and not a row per line
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
    """Raises a UserError that names the columns that are there, the nearest first, if `column`,
    the value of the builder's argument `key`, is none of them."""
    if column in rows.column_names:
        return
    nearest = sorted(
        rows.column_names,
        key=lambda name: SequenceMatcher(None, column.lower(), name.lower()).ratio(),
        reverse=True,
    )
    raise UserError(
        f"dataset.{key}: no column {column!r} in {source}; its columns are {', '.join(nearest)}"
    )


def _data_files(path: Path) -> Iterator[Path]:
    """The data files of a folder, or `path` itself if it is one."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return (file for file in files if file.suffix in SUFFIXES)


def _is_text(path: Path) -> bool:
    """Whether a path has plain text and nothing else."""
    suffixes = {file.suffix for file in _data_files(path)} if path.exists() else set()
    return suffixes == {".txt"}


def _check_json(file: Path) -> None:
    """Raise a UserError that names the first line that is not JSON, if there is one."""
    text = file.read_text(encoding="utf-8-sig")
    whole = text.lstrip().startswith("[")
    for number, document in [(1, text)] if whole else enumerate(text.split("\n"), start=1):
        try:
            if document.strip():
                json.loads(document)
        except json.JSONDecodeError as error:
            line = number + error.lineno - 1
            raise UserError(f"{file}, line {line}: not valid JSON: {error.msg}") from error
