"""Loads the rows of a dataset from a file, a folder of files or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.cli.errors import UserError
from qfsdp.cli.progress import moved
from qfsdp.cli.slow import told_if_slow
from qfsdp.data.csv_files import csv_options
from qfsdp.data.data_files import SUFFIXES, check_beginning, check_whole, suffix_of
from qfsdp.data.json_lines import check_regular
from qfsdp.data.reading import current
from qfsdp.data.row_stream import RowStream

if TYPE_CHECKING:
    from datasets import Dataset

_DAMAGED = (RecursionError, OverflowError, zlib.error, EOFError)  # zlib: a damaged .gz
MAX_LOOKS = 100  # files of a folder whose beginnings are checked

Row = Mapping[str, Any]


def check_source(key: str, source: Any) -> None:
    """Checks the source of a dataset without loading it and without using the network.

    Looks at the beginnings of files.

    A source is a local path if it exists, has a known suffix, starts with `/`, `.` or `~`, or has
    more than one `/`. Any other source is a hub name.

    Args:
        key: the source's place in the config. Messages begin with it.

    Raises:
        UserError: `source` is not text, or is a local path that does not exist, is empty, has an
            unknown suffix, or does not begin as its suffix says.
    """
    expected = f"expected a {', '.join(SUFFIXES)} file, a folder of them or a hub name"
    if not isinstance(source, str):
        raise UserError(f"{key}: {source!r} is not text; {expected}")
    path = Path(source).expanduser()
    if os.path.isfile(path):  # Path.is_file raises OSError if the path is too long
        if suffix_of(path) not in SUFFIXES:
            raise UserError(f"{key}: {source} has the unknown suffix {path.suffix!r}; {expected}")
        if path.stat().st_size == 0:
            raise UserError(f"{key}: {source} is empty; {expected}")
        check_regular(key, path, expected)
        check_beginning(path)
    elif os.path.isdir(path) and _is_saved(path):
        return
    elif os.path.isdir(path) and source:
        files = list(islice(_data_files(path), MAX_LOOKS))
        if not files:
            raise UserError(f"{key}: {source} holds no data file; {expected}")
        for file in files:
            check_regular(key, file, expected)
            check_beginning(file)
    elif os.path.exists(path) and source:
        raise UserError(f"{key}: {source} is no regular file; {expected}")
    elif suffix_of(path) in SUFFIXES or source[:1] in "/.~" or source.count("/") > 1:
        name = source if len(source) < 100 else f"{source[:100]}..."
        raise UserError(f"{key}: {name or 'an empty name'} does not exist; {expected}")


def load_rows(
    source: str,
    split: str,
    subset: str | None = None,
    data_files: str | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Loads the rows of `source`; a `RowStream` of them if the dataset is streamed.

    Args:
        source: a file, a folder or a hub name; see `check_source`. A folder may also be one that
            `save_to_disk` of `datasets` wrote.
        split: "train", or a part, such as "train[:95%]". Files have only "train" and parts of it.
        subset: the configuration of a hub dataset that has several. Files have none;
            `gsm8k_dataset` names one also where its source is a copy on this disk.
        data_files: which files of a folder or a hub dataset to read.
        max_rows: keep only the first `max_rows` rows; None keeps all.

    Raises:
        UserError: an argument is wrong or the source cannot be read.
    """
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import RepositoryNotFoundError

    if max_rows is not None and max_rows < 1:
        raise UserError(f"dataset.max_rows: {max_rows}; expected an integer of at least 1, or null")
    if source in SUFFIXES.values() and data_files:  # torchtune names files so
        source, data_files = data_files, None
    check_source("dataset.source", source)
    if not sys.stderr.isatty():
        disable_progress_bars()  # every update of a bar is a line in a log file
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises as well
    path = Path(source).expanduser()
    if path.is_file() and data_files is not None:
        given = f"dataset.data_files: {data_files} together with the single file {source}"
        raise UserError(f"{given}; expected a folder or a hub dataset as the source")
    options = {"split": split, "streaming": current().streaming}
    try:
        with told_if_slow(f"reading {source}"):
            rows = _load(source, path, subset, data_files, options)
    except (DatasetsError, ValueError, OSError, *_DAMAGED) as error:
        for file in _data_files(path) if os.path.exists(path) else ():
            check_whole(file)
        missing = DatasetNotFoundError | RepositoryNotFoundError
        if isinstance(error, missing) or isinstance(error.__cause__, missing):
            raise UserError(
                f"dataset.source: the hub has no dataset '{source}'; expected a file, a folder or "
                "org/name; private and gated ones need `hf auth login`, or HF_TOKEN"
            ) from error
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"dataset.source: {source}, split {split}: {reason[0]}") from error
    if options["streaming"]:
        stream: Any = RowStream(rows if max_rows is None else rows.take(max_rows), source)
        return stream  # type: ignore[no-any-return]  # `tokenize_rows` knows it
    return rows.select(range(min(max_rows or len(rows), len(rows))))


def _load(
    source: str,
    path: Path,
    subset: str | None,
    data_files: str | None,
    options: Mapping[str, Any],
) -> Any:
    """The rows as `datasets` loads them, with the options `split` and `streaming`."""
    from datasets import load_dataset

    how = _options(path, data_files)
    if path.is_file():
        # The name is free, and part of the key of the library's own cache.
        name = None if options["streaming"] else content_digest(source)[:16]
        kind = SUFFIXES[suffix_of(path)]
        return load_dataset(kind, name, data_files=str(path), **options, **how)
    if _is_saved(path):
        return _saved_rows(path, **options)
    if path.is_dir():
        return load_dataset(str(path), data_files=data_files, **options, **how)
    return load_dataset(source, subset, data_files=data_files, **options)


def content_digest(source: str) -> str:
    """A hash of the contents of a file or of all data files of a folder; "" for a hub name.

    Reads them whole, once per process: 1 GB/s or more. The time of a file says too little: a file
    that is copied back from a backup has its old time.
    """
    path = Path(source).expanduser()
    if not os.path.exists(path):
        return ""
    with told_if_slow(f"hashing {source}"):
        hashes = [
            f"{file.relative_to(path)} {_file_digest(file, file.stat().st_mtime_ns)}"
            for file in _data_files(path)
        ]
    return hashlib.sha256("\n".join(hashes).encode(errors="surrogateescape")).hexdigest()


@lru_cache(maxsize=1000)
def _file_digest(file: Path, changed: int) -> str:
    """The hash of a file that was changed at that time."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while data := stream.read(2**24):
            digest.update(data)
            moved()
    return digest.hexdigest()


def read_each(rows: Iterable[Row], source: str) -> Iterator[Row]:
    """The rows, one after the other. Raises UserError for text that is not UTF-8."""
    try:
        yield from rows
    except UnicodeDecodeError:  # `datasets` does not look at the bytes of a text before
        path = Path(source).expanduser()
        for file in _data_files(path) if os.path.exists(path) else ():
            check_whole(file)
        raise UserError(f"dataset.source: {source}: not UTF-8; expected UTF-8 text") from None


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


def _is_saved(path: Path) -> bool:
    """Whether a folder is one of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _saved_rows(path: Path, split: str, streaming: bool) -> Any:
    """The rows of such a folder."""
    from datasets import DatasetDict, load_from_disk

    rows = load_from_disk(str(path))
    if isinstance(rows, DatasetDict):
        if split not in rows:
            raise ValueError(f"no such split; expected one of {', '.join(rows)}")
        rows = rows[split]
    elif split != "train":
        raise ValueError("a folder of save_to_disk without splits; expected split train")
    return rows.to_iterable_dataset() if streaming else rows


def _data_files(path: Path) -> Iterator[Path]:
    """The data files of a folder, or `path` itself if it is a data file."""
    if _is_saved(path):
        return iter(sorted(path.rglob("*.arrow")))
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return (file for file in files if suffix_of(file) in SUFFIXES)


def _options(path: Path, data_files: str | None) -> dict[str, Any]:
    """What the reader of a path's data files is told."""
    files = list(_data_files(path)) if path.exists() and not _is_saved(path) else []
    if path.is_dir() and data_files:
        files = [file for file in files if file.match(data_files)]
    kinds = {SUFFIXES[suffix_of(file)] for file in files}
    if kinds == {"text"}:
        return {"sample_by": "document"}  # default: a row per line
    return csv_options(files[:MAX_LOOKS]) if kinds == {"csv"} else {}
