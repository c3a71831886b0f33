"""Files with a JSON object per line: read, written, and whether a new one can be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError


def read_rows(key: str, path: str | Path, *needed: str) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, all of which have the columns `needed`; empty lines are no rows.

    Raises:
        UserError: in one line that names `key`, the file or the line of it.
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
            raise UserError(f"{path}, line {number}: not valid JSON: {error.msg}") from None
        for column in needed:
            if not isinstance(row, dict) or column not in row:
                columns = ", ".join(row) if isinstance(row, dict) else "none, as it is no object"
                raise UserError(
                    f"{path}, line {number}: no column {column!r}; its columns are {columns}"
                )
        rows.append(row)
    if not rows:
        raise UserError(f"{key}: '{path}' has no rows")
    return rows


def to_lines(rows: Iterable[dict[str, Any]]) -> str:
    """One line of JSON per row; what JSON does not know becomes text."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def check_new_file(key: str, path: Path, suffix: str = "") -> None:
    """Raises `UserError` unless `path`, which `key` of the config names, can be written, nothing is
    there, and its suffix is `suffix`, if told. Makes the folder."""
    if path.exists():
        raise UserError(f"{key}: '{path}' exists already; name another file")
    if suffix and path.suffix != suffix:
        raise UserError(f"{key}: '{path}'; a file that ends in {suffix} is right")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}: '{path}' cannot be written: {error.strerror}") from None
