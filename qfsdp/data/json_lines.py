"""Reads and writes .jsonl files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError


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
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"{key}: '{path}': {reason}; expected a .jsonl file") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}: not valid JSON: {error.msg}; expected a JSON object"
            ) from None
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


def to_lines(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as JSON, one line each. Values that JSON cannot hold are written as text."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def check_new_file(key: str, path: Path, suffix: str = "") -> None:
    """Checks that a file can be created at `path`, and creates its folder.

    Args:
        key: the file's place in the config, for the messages.
        suffix: the suffix that the file must have; "" allows any.

    Raises:
        UserError: the file exists, its suffix is wrong or its folder cannot be created.
    """
    if path.exists():
        raise UserError(f"{key}: '{path}' exists already; expected a new file")
    if suffix and path.suffix != suffix:
        raise UserError(f"{key}: '{path}'; expected a file that ends in {suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{key}: '{path}' cannot be written: {error.strerror}; expected a writable folder"
        ) from None
