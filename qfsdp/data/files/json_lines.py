"""Reads and writes .jsonl files: one JSON object per line."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.common.files import PARTIAL, not_written, to_json
from qfsdp.common.terminal import warn

MAX_LINE = 2**28  # bytes of a line of JSON; a file without line ends must not fill the memory
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Spelled(float):
    """A number in JSON that is no integer. It prints as it is written: 5.00, 1e5, Infinity.

    It is the `float` for arithmetic, format specifications and `json.dumps`.
    """

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Spelled:
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]  # copies keep the text
        return (self.text,)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else self.text


class OddValue(ValueError):
    """JSON that `json.loads` reads, with a loss: a key twice, or half of a character."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise OddValue(f"the key {twice!r} twice")
    return found


DECODER = json.JSONDecoder(parse_float=Spelled, parse_constant=Spelled, object_pairs_hook=_object)
"""Reads JSON text of rows: integers of any size, other numbers as `Spelled`."""


def value_of(text: str) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: it is not JSON, has a key twice, half of a character, or an integer of over
            4300 digits.
        RecursionError: it has too many nested brackets.
    """
    return _checked(DECODER.decode(text), text, 0, len(text))


def value_at(text: str, begin: int) -> tuple[Any, int]:
    """The value that begins there in a text, and its end. Raises as `value_of` does."""
    value, end = DECODER.raw_decode(text, begin)
    return _checked(value, text, begin, end), end


def _checked(value: Any, text: str, begin: int, end: int) -> Any:
    """The value of a part of a text. Raises OddValue if it has half of a pair of surrogates."""
    if _SURROGATE.search(text, begin, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise OddValue(f"{half!r} alone, half of a character") from None
    return value


def read_rows(key: str, path: str | Path, *needed: str) -> list[dict[str, Any]]:
    """The rows of a .jsonl file. Empty lines are skipped.

    Args:
        key: the file's place in the config, for the messages.
        needed: columns that every row must have.

    Raises:
        UserError: the file cannot be read or has no rows, a line is not JSON, or a row lacks a
            needed column. The message names `key`, or the file and the line.
    """
    path = Path(path).expanduser()
    check_regular(key, path, "expected a .jsonl file")
    rows = []
    for number, row in _json_values(path):
        for column in needed:
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}, line {number}: a {type(row).__name__}; expected a JSON object with "
                    f"the column {column!r}"
                )
            if column not in row:
                raise UserError(
                    f"{path}, line {number}: no column {column!r}; expected one of {', '.join(row)}"
                )
        rows.append(row)
    if not rows:
        raise UserError(f"{key}: '{path}' has no rows; expected at least one")
    return rows


def check_regular(key: str, path: Path, expected: str) -> None:
    """Raises UserError unless `path` is a regular file that can be opened.

    Others may have no end (/dev/zero) or no beginning (a named pipe that nobody writes).
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            what = "a folder" if path.is_dir() else "no regular file"
            raise UserError(f"{key}: '{path}' is {what}; {expected}")
        path.open("rb").close()
    except OSError as error:
        name = str(path) if len(str(path)) < 100 else f"{str(path)[:100]}..."
        raise UserError(f"{key}: '{name}': {error.strerror}; {expected}") from None


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of every line of a .jsonl file that is not blank. Raises UserError: a
    line is not UTF-8, not JSON or longer than 256 MiB. The message names it."""
    with path.open("rb") as stream:
        for number in count(1):
            line = stream.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                raise UserError(
                    f"{path}, line {number}: longer than {MAX_LINE >> 20} MiB; expected one JSON "
                    "object per line"
                )
            text = decoded(path, line, number)
            if text.strip():
                yield number, parsed(path, text.rstrip(), number)


def decoded(path: Path, data: bytes, line: int = 1) -> str:
    """The text of a part of a file that begins with line `line`; UserError if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        at = line + data.count(b"\n", 0, error.start)
        found = f"byte 0x{data[error.start]:02x}"
        raise UserError(f"{path}, line {at}: not UTF-8: {found}; expected UTF-8 text") from None


def parsed(path: Path, text: str, line: int = 1) -> Any:
    """The JSON value in a part of a file that begins with line `line`; UserError if it is none."""
    try:
        return value_of(text)
    except json.JSONDecodeError as error:
        at, reason = line + error.lineno - 1, error.msg
    except OddValue as error:
        at, reason = line, str(error)
    except RecursionError:
        at, reason = line, "too many nested brackets"
    except ValueError:  # what Python refuses to convert
        at, reason = line, "an integer of over 4300 digits"
    raise UserError(f"{path}, line {at}: not valid JSON: {reason}; expected a JSON object")


def to_lines(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as strict JSON, one line each, with null for NaN and infinity. Other values that
    JSON cannot hold are written as text."""
    return "".join(to_json(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> bool:
    """Appends rows to a .jsonl file; prints a warning and returns False if it cannot be written."""
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as lines:
            lines.write(to_lines(rows))
        return True
    except OSError as error:
        warn(f"{not_written(path, error)}; the evaluation goes on without it")
        return False


def check_new_file(key: str, path: Path, suffix: str = "") -> None:
    """Checks that a file can be created at `path`, and creates its folder.

    Args:
        key: the file's place in the config, for the messages.
        suffix: the suffix that the file must have; "" allows any.

    Raises:
        UserError: the file exists, its suffix is wrong or its folder cannot be created.
    """
    if path.is_symlink() and not path.exists():
        target = os.readlink(path)
        raise UserError(f"{key}: '{path}' is a link to '{target}', which does not exist")
    if path.exists():
        raise UserError(f"{key}: '{path}' exists already; expected a new file")
    if suffix and path.suffix != suffix:
        raise UserError(f"{key}: '{path}'; expected a file that ends in {suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder may exist and take no files, as /proc. Another name, and always the same: what a
        # run leaves that is killed here does not block the next one, which removes it.
        tried = path.with_name(f".{path.name[:100]}{PARTIAL}")
        tried.touch()
        tried.unlink(missing_ok=True)  # another run may try the same at this moment
    except OSError as error:
        raise UserError(
            f"{key}: '{path}' cannot be written: {error.strerror}; expected a writable folder"
        ) from None
