"""Rows of preference data as conversations: a prompt with two answers, or with one and its label.

The two answers of a row have the same prompt, so their conversations differ in the last messages
only. Those are trained; the prompt is not, even where it has earlier answers.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.context_columns import check_text_alone, history_of, system_of, with_system
from qfsdp.data.chat.messages import (
    as_message,
    as_messages,
    as_tools,
    from_json,
    holds_messages,
    may_train,
    text_of,
    unfilled,
)
from qfsdp.data.conversations import (
    Chat,
    ChatRows,
    Tokenizer,
    check_answer,
    prompt_columns,
    prompt_of,
)
from qfsdp.data.files.rows import Row
from qfsdp.data.row_forms import TRUTH
from qfsdp.data.row_tokenizer import TokenizedRow, Unusable

Messages = list[dict[str, Any]]

_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Columns:
    """Where a row has its prompt.

    Fields:
        prompt: column with text or messages; None: the answers' columns have whole dialogues.
        template: makes the prompt from columns instead, or None.
        system: column with a system message, or None.
        history: column with the turns before the prompt, or None.
        tools: column with functions, or None; see `chat_dataset`.
        system_prompt: a system message for rows that have none.
    """

    prompt: str | None = None
    template: str | None = None
    system: str | None = None
    history: str | None = None
    tools: str | None = None
    system_prompt: str | None = None


@dataclass(frozen=True)
class PreferenceRows:
    """The `tokenize` of `tokenize_rows` for rows that have one or two conversations.

    Fields:
        tokenizer: of the conversations; it must not cut them.
        to_chats: makes the conversations of a row. Raises `Unusable` or UserError.
        label_column: column with true or false, kept by `with_label`; None: rows have none.
        margin_column: column with a number, kept likewise; None: rows have none.
    """

    tokenizer: Tokenizer
    to_chats: Callable[[Row], list[Chat]]
    label_column: str | None = None
    margin_column: str | None = None

    def __call__(self, rows: Sequence[Row]) -> list[TokenizedRow]:
        """For each row its samples, or why there are none."""
        chats: list[Chat] = []
        ranges: list[slice | Unusable | UserError] = []
        for row in rows:
            try:
                new = self.to_chats(unfilled(row))
            except (Unusable, UserError) as problem:
                ranges.append(problem)
            else:
                ranges.append(slice(len(chats), len(chats) + len(new)))
                chats += new
        tokenized = ChatRows(self.tokenizer, dict)(chats)
        return [
            self._row(row, tokenized[found])
            if isinstance(found, slice)
            else TokenizedRow((), found)
            for row, found in zip(rows, ranges, strict=True)
        ]

    def _row(self, row: Row, parts: Sequence[TokenizedRow]) -> TokenizedRow:
        """The tokenized conversations of a row as one."""
        for part in parts:
            if part.problem is not None:
                return part
        samples = [sample for part in parts for sample in part.samples]
        if len(samples) == 2 and samples[0] == samples[1]:  # texts that differ in white space
            return TokenizedRow((), Unusable("chosen and rejected that are equal"))
        if self.label_column is not None:
            desirable = is_true(row, self.label_column)
            samples = [(ids, with_label(lab, desirable)) for ids, lab in samples]
        if self.margin_column is not None:
            try:
                bits = bits_of(row, self.margin_column)
            except UserError as problem:
                return TokenizedRow((), problem)
            samples = [(ids, with_label(lab, bits)) for ids, lab in samples]
        spelled = (part.spelled for part in parts if part.spelled is not None)
        remarks = (part.remark for part in parts if part.remark is not None)
        return TokenizedRow(samples, None, next(spelled, None), next(remarks, None))


def is_true(row: Row, column: str) -> bool:
    """A cell with true or false, or 1 or 0; those of CSV files are text. Raises UserError."""
    truth = TRUTH.get(str(row[column]).lower())
    if truth is None:
        raise UserError(f"{column}: {str(row[column])[:60]!r}; expected true or false")
    return truth


def class_of(row: Row, column: str, names: Sequence[str] | None) -> int:
    """The number of the class that a cell has or names. Raises UserError."""
    value = str(row[column])
    if names is not None and value in names:
        return list(names).index(value)
    if names is None and value.isdecimal() and int(value) < 2**20:
        return int(value)
    expected = "the number of a class, from 0" if names is None else " | ".join(names)
    raise UserError(f"{column}: {value[:60]!r}; expected {expected}")


def bits_of(row: Row, column: str) -> int:
    """A number of a cell as the int32 with the bits of its fp32. Raises UserError."""
    try:
        margin = float(row[column])
    except (TypeError, ValueError):
        margin = math.nan
    if not abs(margin) < 1e6:
        raise UserError(f"{column}: {str(row[column])[:60]!r}; expected a number") from None
    found: int = struct.unpack("<i", struct.pack("<f", margin))[0]
    return found


def with_label(labels: list[int], desirable: int) -> list[int]:
    """Token labels with a number of the row in the place of the first: 1 or 0 for an answer that is
    desirable or not, a class, or the bits of a margin.

    No token comes before the first one, so it is never a target, and its label is free.
    """
    return [int(desirable), *labels[1:]]


def pair_of(row: Row, columns: Columns, chosen_column: str, rejected_column: str) -> list[Chat]:
    """The conversations of a row with a better and a worse answer.

    Raises:
        Unusable: an answer is empty, the two are equal, their prompts differ, or roles do not
            alternate.
        UserError: a value is neither text nor a list of messages.
    """
    prompt = _prompt(row, columns)
    chosen, rejected = (
        _turns(_cell(row, column), column, columns.prompt is not None)
        for column in (chosen_column, rejected_column)
    )
    if chosen == rejected:
        raise Unusable("chosen and rejected that are equal")
    if chosen[0]["role"] != "assistant":  # whole dialogues: the prompt is their common beginning
        same = [a == b for a, b in zip(chosen, rejected, strict=False)]
        shared = same.index(False) if False in same else len(same)
        prompt = _whole_prompt(prompt, chosen[:shared])
        chosen, rejected = chosen[shared:], rejected[shared:]
    if not all(answer and answer[0]["role"] == "assistant" for answer in (chosen, rejected)):
        raise Unusable("prompts that differ")
    return [_chat(row, columns, prompt, answer) for answer in (chosen, rejected)]


def labelled(row: Row, columns: Columns, answer_column: str, label_column: str) -> list[Chat]:
    """The conversation of a row with one answer and a label.

    Raises:
        Unusable: the answer is empty, or roles do not alternate.
        UserError: the label is not true or false, or the answer neither text nor messages.
    """
    is_true(row, label_column)
    prompt = _prompt(row, columns)
    turns = _turns(_cell(row, answer_column), answer_column, columns.prompt is not None)
    if turns[0]["role"] != "assistant":
        prompt, turns = _whole_prompt(prompt, turns[:-1]), turns[-1:]
    return [_chat(row, columns, prompt, turns)]


def dialogue(text: str) -> Messages:
    """The messages of a text in the form of Anthropic's HH data (arXiv:2204.05862).

        \\n\\nHuman: question\\n\\nAssistant: answer\\n\\nHuman: ...

    Raises:
        Unusable: the text does not begin so.
    """
    start, *parts = re.split(r"(?:\A\s*|\n\n)(Human|Assistant):", text)
    if start.strip() or not parts or parts[0] != "Human":
        raise Unusable("text that is no dialogue of Human: and Assistant:")
    said = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _SPEAKERS[who], "content": words.strip()} for who, words in said]


def _cell(row: Row, column: str) -> Any:
    """The value of a cell; messages that it has as JSON text as messages."""
    value = row[column]
    return from_json(column, value) if holds_messages(value) else value


def _prompt(row: Row, columns: Columns) -> Messages:
    if columns.template is not None:
        value: Any = prompt_of(row, columns.template, prompt_columns("", columns.template)[1])
    else:
        value = _cell(row, columns.prompt) if columns.prompt is not None else []
    if isinstance(value, list):
        return _messages(value)
    text = text_of(value)
    if not text.strip():
        raise Unusable("an empty prompt")
    if re.fullmatch(r"\s*Human:.*\n\nAssistant:\s*", text, re.DOTALL):  # up to the answer
        return dialogue(text)[:-1]
    return [{"role": "user", "content": text}]


def _turns(value: Any, column: str, has_prompt: bool) -> Messages:
    """The messages of an answer's column: the answer alone, or a whole dialogue."""
    if isinstance(value, Mapping) and not isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        try:
            text = text_of(value)
        except UserError as error:
            raise UserError(f"{column}: {error} or a list of messages") from None
        if not text.strip():
            raise Unusable("an empty answer")
        return [{"role": "assistant", "content": text}] if has_prompt else dialogue(text)
    if not value:
        raise Unusable("an empty answer")
    return _messages(value)


def _messages(turns: list[Any]) -> Messages:
    return as_messages(turns, _message)


def _message(turn: Any) -> dict[str, Any]:
    message = as_message(turn)
    return message if may_train(turn) else message | {"masked": True}


def _whole_prompt(given: Messages, found: Messages) -> Messages:
    """Of the prompt of its own column and that of a dialogue the one that has the other in it.

    Raises:
        Unusable: neither has, as with another question or system message.
    """
    ours, theirs = (
        [(message["role"], (message["content"] or "").strip()) for message in messages]
        for messages in (given, found)
    )
    if set(ours) <= set(theirs):
        return found
    if not theirs or ours[-len(theirs) :] != theirs:
        raise Unusable("a prompt that differs from that of its answers")
    return given  # it has a system message, or turns before the dialogue


def _chat(row: Row, columns: Columns, prompt: Messages, answer: Messages) -> Chat:
    """A conversation in which the assistant's messages of `answer` are trained.

    Raises:
        Unusable: roles do not alternate, an answer is empty, or none may be trained.
        UserError: the history is no list of pairs or messages.
    """
    check_text_alone(row)
    prompt = [*_messages(history_of(row, columns.history)), *prompt]
    prompt = with_system(system_of(row, columns.system) or columns.system_prompt, prompt)
    _check_roles([*prompt, *answer])
    for message in answer:
        if message["role"] == "assistant":
            check_answer(message)
    messages = [message | {"masked": True} for message in prompt]
    messages += [{"masked": message["role"] != "assistant"} | message for message in answer]
    if all(message["masked"] for message in messages):
        raise Unusable("an answer that is not to be trained")
    return {"messages": messages, "tools": as_tools(row.get(columns.tools or ""))}


def _check_roles(messages: Messages) -> None:
    roles = [message["role"] for message in messages]
    while roles and roles[0] in ("system", "developer"):
        roles = roles[1:]
    if not roles or roles[0] == "assistant":
        raise Unusable("no prompt")
    if roles[-1] != "assistant":
        raise Unusable("no answer at the end")
    if any(a == b != "tool" for a, b in pairwise(roles)) or roles[0] != "user":
        raise Unusable("roles that do not alternate")
