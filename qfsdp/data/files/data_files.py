"""Which files of a folder are read, and whether a file begins as its name says.

`check_beginning` reads a megabyte and finds a file of another kind before anything is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path

from qfsdp.common.errors import UserError
from qfsdp.common.files import check_no_pointer
from qfsdp.common.long_waits import long_wait
from qfsdp.data.files.file_records import (
    BEGINNING,
    SUFFIXES,
    CsvRecords,
    JsonLines,
    Records,
    check_object,
    suffix_of,
)
from qfsdp.data.files.json_lines import decoded, parsed

MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
GZIP = b"\x1f\x8b"


def is_saved(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote a folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def listed(folder: Path, pattern: str | None = None) -> tuple[list[Path], list[str]]:
    """The data files of a folder and of the folders in it, sorted, and the files left out.

    Names mean nothing, except that hidden files and folders (.x) are left out, as are files of
    other kinds and `dataset_infos.json`, in which `datasets` describes the others. Links are
    followed; a folder that several links lead to is read once.

    Args:
        pattern: only files with this path in the folder; if there is none, files whose path the
            pattern matches (`*.jsonl`, `2023/*.csv`, `**/a.txt`).

    Returns:
        The files, and for each one left out its path in the folder, with a reason in brackets.
    """
    with long_wait(f"listing the files of {folder}"):
        files, left_out = _walked(folder)
    if pattern is None:
        return files, left_out
    named = folder / pattern
    try:
        chosen = {named} if named in files else set(folder.glob(pattern))
    except (NotImplementedError, ValueError):  # of another folder, or ""
        chosen = set()
    left_out += [f.relative_to(folder).as_posix() for f in files if f not in chosen]
    return [file for file in files if file in chosen], left_out


def _walked(folder: Path) -> tuple[list[Path], list[str]]:
    """As `listed` without a pattern."""
    files, left_out, seen = list[Path](), list[str](), set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        inside = Path(place).relative_to(folder)
        if (real := os.path.realpath(place)) in seen:
            left_out.append(f"{inside.as_posix()} (a second way to a folder)")
            folders.clear()
            continue
        seen.add(real)
        hidden = [name for name in folders if name.startswith(".")]
        left_out += [f"{(inside / name).as_posix()} (hidden)" for name in hidden]
        folders[:] = sorted({*folders} - {*hidden})
        for name in sorted(names):
            file = folder / inside / name
            if name.startswith("."):
                left_out.append(f"{(inside / name).as_posix()} (hidden)")
            elif suffix_of(file) not in SUFFIXES or name == "dataset_infos.json":
                left_out.append((inside / name).as_posix())
            else:
                files.append(file)
    return sorted(files), left_out


def check_beginning(file: Path) -> None:
    """Checks the first megabyte of a data file. Raises UserError: it is binary, not UTF-8, or does
    not begin with a JSON object or a list of them."""
    check_no_pointer(file)
    with file.open("rb") as stream:
        data = stream.read(BEGINNING)
    if suffix_of(file) == ".parquet":
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
    if suffix_of(file) == ".jsonl" and not is_whole and not end:
        _check_records(JsonLines(file))  # one line, if not longer than MAX_LINE
    elif suffix_of(file) in (".jsonl", ".json"):
        _check_json_beginning(file, text)
    elif suffix_of(file) in (".csv", ".tsv"):
        _check_records(CsvRecords(file))


def _check_records(records: Records) -> None:
    """Reads the rows of the first megabyte, and the first row in any case."""
    for at, after, content in records.read(0):
        if at and after > BEGINNING:
            return
        records.value(content, at)


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
    if first and (suffix_of(file) == ".jsonl" or not first.startswith("{")):
        check_object(file, line, parsed(file, first, line))
