"""Loads the rows of a dataset from a file, a folder of files or the Hugging Face hub.

Files are read by `qfsdp.data.files.file_rows`: values are as they are written, names mean nothing,
and nothing is kept on disk. `datasets` reads the hub and the folders of its `save_to_disk`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from qfsdp.common.errors import UserError, speaks_for_all
from qfsdp.common.file_digests import file_digest
from qfsdp.common.files import DAMAGED
from qfsdp.common.long_waits import long_wait
from qfsdp.common.messages import first_line
from qfsdp.common.terminal import is_terminal
from qfsdp.data.files.data_files import check_beginning, is_saved, listed
from qfsdp.data.files.file_records import SUFFIXES, suffix_of
from qfsdp.data.files.file_rows import FilePart, FileRow, FileRows, FileStream, RowStream
from qfsdp.data.files.json_lines import check_regular
from qfsdp.data.reading import current
from qfsdp.hub.download import name_in_address

MAX_LOOKS = 100  # files of a folder whose beginnings are checked
SHUFFLED = " shuffled"  # behind a split
NAMED = 10  # files of a folder in the line that says which are read

Row = Mapping[str, Any]

log = logging.getLogger("qfsdp")


class Rows(Protocol):
    """Rows that are counted: `FileRows`, or a `Dataset` of `datasets`."""

    @property
    def column_names(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def select(self, chosen: range, /) -> Rows: ...


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
    elif os.path.isdir(path) and is_saved(path):
        return
    elif os.path.isdir(path) and source:
        files = _data_files(path)[:MAX_LOOKS]
        if not files:
            raise UserError(f"{key}: {source} holds no data file; {expected}")
        for file in files:
            check_regular(key, file, expected)
            check_beginning(file)
    elif os.path.exists(path) and source:
        raise UserError(f"{key}: {source} is no regular file; {expected}")
    elif (name := name_in_address(source)) is not None:
        raise UserError(f"{key}: {source} is an address; expected the name: {name}")
    elif suffix_of(path) in SUFFIXES or source[:1] in "/.~" or source.count("/") > 1:
        name = source if len(source) < 100 else f"{source[:100]}..."
        raise UserError(f"{key}: {name or 'an empty name'} does not exist; {expected}")


def load_rows(
    source: str,
    split: str,
    subset: str | None = None,
    data_files: str | None = None,
    max_rows: int | None = None,
) -> Rows:
    """Loads the rows of `source`; a `RowStream` of them if the dataset is streamed.

    All data files of a folder and of the folders in it are read, in the order of their paths,
    whatever their names; see `listed`. One log line names them, and what is left out.

    Args:
        source: a file, a folder or a hub name; see `check_source`. A folder may also be one that
            `save_to_disk` of `datasets` wrote.
        split: "train", or a part, such as "train[:95%]". Files have only "train" and parts of it.
            "train[:95%] shuffled" takes other rows: those that a shuffle, always the same, has
            there. They keep the order of the files.
        subset: the configuration of a hub dataset that has several. Files have none;
            `gsm8k_dataset` names one also where its source is a copy on this disk.
        data_files: which files of a folder or a hub dataset to read: a path in it, or a pattern.
        max_rows: keep only the first `max_rows` rows; None keeps all.

    Raises:
        UserError: an argument is wrong or the source cannot be read.
    """
    if max_rows is not None and max_rows < 1:
        raise UserError(f"dataset.max_rows: {max_rows}; expected an integer of at least 1, or null")
    if source in SUFFIXES.values() and data_files:  # torchtune names files so
        source, data_files = data_files, None
    check_source("dataset.source", source)
    path = Path(source).expanduser()
    if path.is_file() and data_files is not None:
        given = f"dataset.data_files: {data_files} together with the single file {source}"
        raise UserError(f"{given}; expected a folder or a hub dataset as the source")
    streaming = current().streaming
    if os.path.exists(path) and not is_saved(path):
        files = [path] if path.is_file() else _chosen(source, path, data_files)
        if streaming:
            _spans(source, split, None)
            stream: Any = RowStream(FileStream(files, max_rows), source)
            return stream  # type: ignore[no-any-return]  # `tokenize_rows` knows it
        with long_wait(f"reading {source}"):
            found = FileRows([FilePart(file) for file in files])
        if not len(found):
            raise UserError(f"dataset.source: {source} has no rows; expected at least one")
        found = found.select(*_spans(source, split, len(found)))
        return found.select(range(min(max_rows or len(found), len(found))))
    name = _shuffled_name(source, split)
    if name is not None and streaming:
        raise UserError(f"dataset.split: {split!r}: {source} is a stream; expected {name}")
    rows = _load(source, path, name or split, subset, data_files, streaming)
    if name is not None:
        spans = _spans(source, split.replace(name, "train", 1), len(rows))
        rows = rows.select(list(chain.from_iterable(spans)))
    if streaming:
        stream = RowStream(rows if max_rows is None else rows.take(max_rows), source)
        return stream  # type: ignore[no-any-return]
    return rows.select(range(min(max_rows or len(rows), len(rows))))  # type: ignore[no-any-return]


def _chosen(source: str, folder: Path, data_files: str | None) -> list[Path]:
    """The data files of a folder that are read; says which, and which are not."""
    files, left_out = listed(folder, data_files)
    if not files:
        raise UserError(
            f"dataset.data_files: {data_files!r}: no data file of {source} has this path; expected "
            "a path in the folder, or a pattern such as *.jsonl"
        )
    if speaks_for_all():
        names = [file.relative_to(folder).as_posix() for file in files]
        count = f"{len(files):,} file{'s' * (len(files) > 1)}"
        rest = f"; left out: {_some(left_out)}" if left_out else ""
        # A folder with .txt and .md files would lose the second kind in silence.
        unread = data_files is None and any(not name.endswith(")") for name in left_out)
        level = logging.WARNING if unread else logging.INFO
        log.log(level, "%s: reads %s: %s%s", source, count, _some(names), rest)
    return files


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _spans(source: str, split: str, count: int | None) -> list[range]:
    """The rows that a split of files means; of a stream (`count` None) it can only be "train"."""
    from datasets import ReadInstruction

    in_files, is_shuffled = split.removesuffix(SHUFFLED), split.endswith(SHUFFLED)
    try:
        if count is None:
            if split != "train":
                raise ValueError("a stream of files; expected train")
            return []
        found = ReadInstruction.from_spec(in_files).to_absolute({"train": count})
    except (ValueError, AssertionError) as error:
        reason = first_line(error)
        hint = " Files have only train; dataset.data_files chooses some." * ("Unknown" in reason)
        raise UserError(f"dataset.source: {source}, split {split}: {reason}{hint}") from None
    spans = [range(part.from_ or 0, count if part.to is None else part.to) for part in found]
    return _shuffled(spans, count) if is_shuffled else spans


def _shuffled(spans: list[range], count: int) -> list[range]:
    """The rows that stand at `spans` when `count` rows are shuffled, in their old order."""
    import torch

    from qfsdp.data.shuffling import shuffled_indices

    order = shuffled_indices(count, "split")
    rows = torch.cat([order[span.start : span.stop] for span in spans]).sort().values
    if not len(rows):
        return []
    ends = [*(rows.diff() != 1).nonzero().flatten().tolist(), len(rows) - 1]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    return [
        range(first, last + 1)
        for first, last in zip(rows[firsts].tolist(), rows[ends].tolist(), strict=True)
    ]


def _shuffled_name(source: str, split: str) -> str | None:
    """The name in "NAME[...] shuffled"; None: the split is not shuffled."""
    if not split.endswith(SHUFFLED):
        return None
    if (found := re.fullmatch(r"([\w.-]+)(\[.*\])?", split.removesuffix(SHUFFLED))) is None:
        expected = "a name and a part, such as 'train[:95%] shuffled'"
        raise UserError(f"dataset.source: {source}, split {split}: expected {expected}")
    return found[1]


def _load(
    source: str, path: Path, split: str, subset: str | None, data_files: str | None, streaming: bool
) -> Any:
    """The rows as `datasets` loads them, from the hub or a folder that it saved."""
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import RepositoryNotFoundError

    from qfsdp.data.files.parquet_files import with_exact_numbers

    if not is_terminal():
        disable_progress_bars()  # every update of a bar is a line in a log file
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises as well
    try:
        with long_wait(f"reading {source}"):
            if os.path.exists(path):
                return with_exact_numbers(_saved_rows(path, split, streaming))
            options: Any = {"split": split, "streaming": streaming}
            return with_exact_numbers(
                load_dataset(source, subset, data_files=data_files, **options)
            )
    except (DatasetsError, ValueError, *DAMAGED) as error:
        missing = DatasetNotFoundError | RepositoryNotFoundError
        if isinstance(error, missing) or isinstance(error.__cause__, missing):
            raise UserError(
                f"dataset.source: the hub has no dataset '{source}'; expected a file, a folder or "
                "org/name; private and gated ones need `hf auth login`, or HF_TOKEN"
            ) from error
        reason = first_line(error.__cause__ or error)
        raise UserError(f"dataset.source: {source}, split {split}: {reason}") from error


def content_digest(source: str) -> str:
    """A hash of the contents of a file or of all data files of a folder; "" for a hub name. Each is
    read whole, once per machine: 1 GB/s or more."""
    path = Path(source).expanduser()
    if not os.path.exists(path):
        return ""
    with long_wait(f"hashing {source}"):
        hashes = [f"{file.relative_to(path)} {file_digest(file)}" for file in _data_files(path)]
    return hashlib.sha256("\n".join(hashes).encode(errors="surrogateescape")).hexdigest()


def read_each(rows: Iterable[Row], source: str) -> Iterator[Row]:
    """The rows, one after the other. Raises UserError for text that is not UTF-8."""
    try:
        yield from rows
    except UnicodeDecodeError:  # `datasets` does not look at the bytes of a text before
        raise UserError(f"dataset.source: {source}: not UTF-8; expected UTF-8 text") from None


def where(source: str, number: int, row: Row) -> str:
    """Where a row stands, for messages: its number, and its file and line where they differ."""
    places = []
    if isinstance(row, FileRow):
        if row.file != Path(source).expanduser():
            places = [str(row.file)]
        if (line := row.line) is not None and (line != number or places):
            places.append(f"line {line}")
    return f"dataset.source: {source}, row {number}" + f" ({', '.join(places)})" * bool(places)


def require_column(key: str, column: str, rows: Any, source: str) -> None:
    """Raises UserError unless the rows, and those of every file, have the column `column`.

    Args:
        key: the builder's argument that names the column.
        rows: of `load_rows`.
        source: of the rows, for the message. The message lists the columns, the most similar
            first.
    """
    names = rows.column_names
    if isinstance(rows, FileRows):
        lacking = rows.lacks(column)
        if lacking is None:
            return
        if column in names:
            source, names = str(lacking.file), lacking.columns
    elif column in names:
        return
    raise no_column(f"dataset.{key}", column, source, names)


def no_column(key: str, column: str, source: str, names: Iterable[str]) -> UserError:
    """The error for a `column` that rows with the columns `names` do not have."""

    def difference(name: str) -> float:
        return -SequenceMatcher(None, column.lower(), name.lower()).ratio()

    expected = f"expected one of {', '.join(sorted(names, key=difference))}"
    return UserError(f"{key}: no column {column!r} in {source}; {expected}")


def _saved_rows(path: Path, split: str, streaming: bool) -> Any:
    from datasets import DatasetDict, load_from_disk

    rows = load_from_disk(str(path))
    if isinstance(rows, DatasetDict):
        if split not in rows:
            raise ValueError(f"no such split; expected one of {', '.join(rows)}")
        rows = rows[split]
    elif split != "train":
        raise ValueError("a folder of save_to_disk without splits; expected split train")
    return rows.to_iterable_dataset() if streaming else rows


def _data_files(path: Path) -> list[Path]:
    """The data files of a folder, or `path` itself."""
    if path.is_file():
        return [path]
    return sorted(path.rglob("*.arrow")) if is_saved(path) else listed(path)[0]
