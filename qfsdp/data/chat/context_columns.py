"""Columns with what comes before a prompt: a system message, earlier turns, functions.

Training, preferences, exact match and generate read them by the same keys and as the same messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.choose_template import say_once
from qfsdp.data.chat.messages import from_json, text_of
from qfsdp.data.files.rows import Row, no_column, require_column

_OF_OTHERS = {
    "system": "system_column",
    "history": "history_column",
    "functions": "tools_column",
    "tools": "tools_column",
    "instruction": "prompt_template",
    "input": "prompt_template",
    "context": "prompt_template",
    **dict.fromkeys(("documents", "chat_template_kwargs", "loss_mask")),
}
"""Columns that hold parts of conversations in data of other projects -> the key that names them.
None: nothing reads them. The columns of Alpaca's and Dolly's rows are named only where a prompt is
made."""

_NOT_TEXT = ("images", "videos", "audios", "image", "video", "audio")


def check_text_alone(row: Row, read: Collection[str] = ()) -> None:
    """Raises UserError for a row with pictures or sound: text about them alone would mislead.

    Args:
        read: columns that are read as text, whatever their names.
    """
    for column in _NOT_TEXT:
        if column not in read and row.get(column) not in (None, "", [], {}):
            raise UserError(
                f"column {column!r} holds {str(row[column])[:60]!r}; expected rows of text alone"
            )


def check_columns(
    rows: Any,
    source: str,
    named: Mapping[str, str | None],
    read: Collection[str | None],
    section: str = "dataset.",
) -> None:
    """Says which columns are not read that hold parts of conversations in other projects' data.

    Args:
        rows: of `load_rows`, or a list of rows, which may lack keys.
        named: the builder's keys for such columns and their values.
        read: more columns that the builder reads.
        section: stands before the keys in messages.

    Raises:
        UserError: there is no column of a name in `named`, except of the default `tools`.
    """
    of_list = dict.fromkeys(n for row in rows for n in row) if isinstance(rows, list) else None
    columns = rows.column_names if of_list is None else of_list
    for argument, name in named.items():
        if name is None or name == "tools":
            continue
        if of_list is None:
            require_column(argument, name, rows, source)
        elif name not in of_list:
            raise no_column(f"{section}{argument}", name, source, of_list)
    for column, key in _OF_OTHERS.items():
        if key == "prompt_template" and key not in named:
            continue
        if column in columns and column not in {*named.values(), *read}:
            value = f"'...{{{column}}}...'" if key == "prompt_template" else column
            hint = f"; {section}{key}={value} reads it" if key in named else ""
            say_once(f"{source}: column {column!r} is not read{hint}")


def check_row_columns(rows: Any, source: str, named: Any, read: Any, section: str = "") -> None:
    """`check_columns` by its name in version 0.2, for rows in memory; goes with 0.3."""
    check_columns(rows, source, named, read, section)


def system_of(row: Row, column: str | None) -> str | None:
    """The system message in a column; None: there is none."""
    return None if column is None else text_of(row.get(column)).strip() or None


def with_system(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a system message before them, which is not trained, if they have none."""
    if system is None or (messages and messages[0].get("role") in ("system", "developer")):
        return messages
    return [{"role": "system", "content": system, "masked": True}, *messages]


def history_of(row: Row, column: str | None) -> list[Any]:
    """The turns in a column, each as `as_message` takes it; pairs of texts are two. Raises
    UserError: the column holds something else."""
    value = None if column is None else row.get(column)
    turns = from_json("history", value or [])
    if not isinstance(turns, list):
        raise UserError(f"history: {str(turns)[:60]!r}; expected a list of pairs or messages")
    messages: list[Any] = []
    for turn in turns:
        if isinstance(turn, list) and len(turn) == 2:
            pair = zip(("user", "assistant"), turn, strict=True)
            messages += [{"role": role, "content": text_of(text)} for role, text in pair]
        else:
            messages.append(turn)
    return messages
