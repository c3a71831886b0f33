"""Instruction and chat datasets: each row is a conversation.

Items are `{"tokens": list[int], "labels": list[int]}` of equal length. Labels are -100 where a
token is not trained, and they are *not* shifted. The builders of torchtune 0.6.1 give the same
items, so `torchtune.datasets.alpaca_dataset` and others work with `qfsdp.data.StepLoader` too.

Rows are tokenized when the dataset is built, because some rows turn out to be unusable. The number
of samples and of steps per epoch is then known, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from string import Formatter
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.data.chat.context_columns import (
    check_columns,
    check_text_alone,
    history_of,
    system_of,
    with_system,
)
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
from qfsdp.data.chat.trained_spans import TokenizedChat
from qfsdp.data.files.rows import Row, Rows, load_rows, require_column
from qfsdp.data.reading import reads_rows
from qfsdp.data.tokenized_dataset import TokenizedDataset, TokenizedRow, Unusable, tokenize_rows
from qfsdp.data.tokenizer import HFTokenizer

if TYPE_CHECKING:
    from torchtune.data import Message

Tokenizer = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A torchtune tokenizer or `HFTokenizer`: `{"messages": list[Message]}` -> `{"tokens", "mask"}`."""

Chat = dict[str, Any]
"""`{"messages": [...], "tools": [...] or None}`, messages with the key `masked`."""


@reads_rows
def instruct_dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    system_column: str | None = None,
    history_column: str | None = None,
    tools_column: str | None = "tools",
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    train_on_input: bool = False,
    max_rows: int | None = None,
) -> TokenizedDataset:
    """Prompts with answers: each row is a chat of one user message and one assistant message.

    Skips rows with an empty answer and rows without a trained token within the tokenizer's
    `max_seq_len`. One log line counts them.

    Args:
        tokenizer: `hf_tokenizer(...)` or one of torchtune's.
        source: a .jsonl, .json, .parquet, .csv or .tsv file, also with .gz behind it, a folder of
            them, or a hub name.
        split, subset, data_files, max_rows: as in `load_rows`.
        prompt_column: column with the prompt. Ignored if `prompt_template` is given.
        answer_column: column with the answer.
        system_column: column with a system message. Rows may have none.
        history_column: column with the turns before: a list of pairs of a question and an answer,
            or of messages, or JSON text of one. Rows may have none. Their answers are trained too.
        tools_column: column with the functions that the assistant may call: a list of JSON schemas,
            or JSON text of one. Rows may have none. Null: the template sees no functions.
        system_prompt: a system message for rows without one.
        prompt_template: format string that makes the prompt from columns, such as
            "{instruction}\\n{input}". White space around the result is removed.
        train_on_input: train on the prompt as well, but never on the system message.

    Raises:
        UserError: the source, a column or the template is wrong, or no row can be used.
    """
    rows = load_rows(source, split, subset, data_files, max_rows)
    key, columns = prompt_columns(prompt_column, prompt_template)
    for name, column in (*((key, one) for one in columns), ("answer_column", answer_column)):
        require_column(name, column, rows, source)
    if tools_column == "tools" and tools_column in (*columns, answer_column):
        tools_column = None  # the default: the column is text of the prompt
    named = {"system_column": system_column, "history_column": history_column}
    named, read = named | {"tools_column": tools_column}, {*columns, answer_column}
    check_columns(rows, source, named | {"prompt_template": None}, read)

    def to_chat(row: Row) -> Chat:
        check_text_alone(row, read)
        prompt, history = prompt_of(row, prompt_template, columns), history_of(row, history_column)
        messages = _pair(prompt, text_of(row[answer_column]), history, train_on_input)
        messages = with_system(system_of(row, system_column) or system_prompt, messages)
        return {"messages": messages, "tools": as_tools(row.get(tools_column or ""))}

    return _tokenize(tokenizer, rows, to_chat, source)


@reads_rows
def chat_dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    messages_column: str = "messages",
    system_column: str | None = None,
    tools_column: str | None = "tools",
    train_on_input: bool = False,
    train_on_last_turn_only: bool = False,
    max_rows: int | None = None,
) -> TokenizedDataset:
    """Conversations: each row has a list of messages.

    Messages have OpenAI's format `{"role", "content"}` or ShareGPT's format `{"from", "value"}`.
    They may have tool calls, which are trained, and results of tools, which are not; see
    `qfsdp.data.chat.messages`. A message with `train`, `training` or `loss` false or `weight` 0 is
    not trained. Skips rows without an answer, with an empty answer, or without a trained token
    within the tokenizer's `max_seq_len`. One log line counts them.

    Args:
        tokenizer, source, split, subset, data_files, max_rows: as in `instruct_dataset`.
        messages_column: column with the messages: a list, or JSON text of one.
        system_column: column with a system message, for rows whose messages begin with none.
        tools_column: as in `instruct_dataset`.
        train_on_input: train on all messages instead of the assistant's only.
        train_on_last_turn_only: train only on the last answer. Needed for chat templates that
            leave out the reasoning of earlier turns.

    Raises:
        UserError: the source, a column, a role, a tool or a tool call is wrong, the chat template
            leaves out a part of a message, or no row can be used.
    """
    rows = load_rows(source, split, subset, data_files, max_rows)
    require_column("messages_column", messages_column, rows, source)
    named = {"system_column": system_column, "tools_column": tools_column}
    check_columns(rows, source, named, {messages_column})
    options = (train_on_input, train_on_last_turn_only, tools_column, system_column)
    return tokenize_conversations(
        tokenizer, rows, source, lambda row: row[messages_column] or [], *options
    )


def tokenize_conversations(
    tokenizer: Tokenizer,
    rows: Rows,
    source: str,
    turns_of: Callable[[Row], Sequence[Row]],
    train_on_input: bool,
    train_on_last_turn_only: bool,
    tools_column: str | None = None,
    system_column: str | None = None,
) -> TokenizedDataset:
    """Tokenizes rows that `turns_of` turns into lists of messages; see `chat_dataset`.

    Args:
        turns_of: returns the messages of a row in one of the two formats of `chat_dataset`.
    """
    if train_on_input and train_on_last_turn_only:
        raise UserError(
            "dataset.train_on_last_turn_only: true together with train_on_input; "
            "expected at most one of them"
        )

    def to_chat(row: Row) -> Chat:
        check_text_alone(row)
        turns = turns_of(row)
        if isinstance(turns, str) and turns.lstrip().startswith("["):
            turns = from_json("messages", turns)
        if not isinstance(turns, list):
            kind = type(turns).__name__
            raise UserError(f"messages: a {kind}: {str(turns)[:60]!r}; expected a list of messages")
        messages = as_messages(turns, partial(_to_message, train_on_input=train_on_input))
        answers = [message for message in messages if message["role"] == "assistant"]
        if not answers:
            raise Unusable("no answer")
        if train_on_last_turn_only:
            for message in answers[:-1]:
                message["masked"] = True
        messages = with_system(system_of(row, system_column), messages)
        return {"messages": messages, "tools": as_tools(row.get(tools_column or ""))}

    return _tokenize(tokenizer, rows, to_chat, source)


def _pair(prompt: str, answer: str, history: list[Any], on_input: bool) -> list[dict[str, Any]]:
    """A prompt and its answer after earlier turns; `on_input`: the prompt is trained too."""
    messages = [
        *as_messages(history, partial(_to_message, train_on_input=on_input)),
        {"role": "user", "content": prompt, "masked": not on_input},
        {"role": "assistant", "content": answer, "masked": False},
    ]
    check_answer(messages[-1])
    return messages


def prompt_columns(column: str, template: str | None) -> tuple[str, list[str]]:
    """The key that names the columns of a prompt, and the columns."""
    if template is None:
        return "prompt_column", [column]
    try:
        columns = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"dataset.prompt_template: {template!r}: {error}") from error
    if not columns:
        raise UserError(
            f"dataset.prompt_template: {template!r} names no column; "
            "expected column names in braces, such as {question}"
        )
    return "prompt_template", columns


def prompt_of(row: Row, template: str | None, columns: Sequence[str]) -> str:
    """The template with the texts of columns in it; without one, the text of the only column."""
    if template is None:
        prompt = text_of(row[columns[0]])
        if not prompt and not isinstance(row[columns[0]], str):
            raise UserError(f"nothing in column {columns[0]!r}; expected text")
        if holds_messages(prompt):
            text = f"column {columns[0]!r}: {prompt[:60]!r}: messages"
            raise UserError(f"{text}; expected text, or rows for qfsdp.data.chat_dataset")
        return prompt
    values = {name: _formatted(name, row[name]) for name in columns}
    try:
        return template.format(**values).strip()
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as e:
        raise UserError(
            f"prompt_template {template!r}: {e or 'out of memory'}; expected column names in "
            "braces, such as {question}"
        ) from None


def _formatted(name: str, value: Any) -> Any:
    """What a template writes for a value: its text, or the number if that has the same text, so
    that {score:.2f} works."""
    try:
        text = text_of(value)
    except UserError as error:
        raise UserError(f"column {name!r}: {error}") from None
    return value if text and str(value) == text else text


def check_answer(message: Mapping[str, Any]) -> None:
    if not (message["content"] or "").strip() and not message.get("tool_calls"):
        raise Unusable("an empty answer")


def _to_message(turn: Any, train_on_input: bool) -> dict[str, Any]:
    """A message of the data as a message for the template, with the key `masked`."""
    message = as_message(turn)
    answers = message["role"] == "assistant"
    if answers:
        check_answer(message)
    asked_for = any(turn.get(key) is True for key in ("train", "training"))  # as Axolotl has it
    trained = may_train(turn) and (train_on_input or answers or asked_for)
    return message | {"masked": not trained}


def _tokenize(
    tokenizer: Tokenizer, rows: Rows, to_chat: Callable[[Row], Chat], source: str
) -> TokenizedDataset:
    limit: int | None = getattr(tokenizer, "max_seq_len", None)
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.say_template()
    return tokenize_rows(rows, source, ChatRows(tokenizer, to_chat), limit)


@dataclass(frozen=True)
class ChatRows:
    """Turns rows into one sample each, several rows at once.

    Fields:
        tokenizer: of the conversations.
        to_chat: makes a conversation of a row. Raises `Unusable` or UserError.
    """

    tokenizer: Tokenizer
    to_chat: Callable[[Row], Chat]

    def __call__(self, rows: Sequence[Row]) -> list[TokenizedRow]:
        """For each row its sample, or why there is none."""
        chats: dict[int, Chat] = {}
        found: dict[int, TokenizedRow] = {}
        for index, row in enumerate(rows):
            try:
                chats[index] = self.to_chat(unfilled(row))
            except (Unusable, UserError) as problem:
                found[index] = TokenizedRow(problem=problem)
        tokenized = self._tokenize(list(chats.values()))
        found |= dict(zip(chats, map(self._sample, tokenized), strict=True))
        return [found[index] for index in range(len(rows))]

    def _tokenize(self, chats: list[Chat]) -> list[TokenizedChat | Unusable | UserError]:
        if isinstance(self.tokenizer, HFTokenizer):
            return list(self.tokenizer.tokenize_chats(chats))
        found: list[TokenizedChat | Unusable | UserError] = []
        for chat in chats:
            try:
                sample = self.tokenizer({"messages": _of_torchtune(chat)})
                found.append(TokenizedChat(sample["tokens"], sample["mask"]))
            except (Unusable, UserError) as problem:
                found.append(problem)
            except ValueError as error:  # torchtune's chat templates raise it
                found.append(UserError(str(error)))
        return found

    def _sample(self, found: TokenizedChat | Unusable | UserError) -> TokenizedRow:
        if not isinstance(found, TokenizedChat):
            return TokenizedRow(problem=found)
        tokens, mask = found.tokens, found.mask
        labels = [IGNORE_INDEX if m else t for t, m in zip(tokens, mask, strict=True)]
        # The first label is not a target: no token comes before it.
        if all(label == IGNORE_INDEX for label in islice(labels, 1, None)):
            limit: int | None = getattr(self.tokenizer, "max_seq_len", None)
            return TokenizedRow(problem=Unusable(f"no trained token (max_seq_len {limit})"))
        return TokenizedRow([(tokens, labels)], spelled=found.spelled, remark=found.remark)


def _of_torchtune(chat: Chat) -> list[Message]:
    """A conversation for torchtune's tokenizers, which know no tools."""
    from torchtune.data import Message

    if chat.get("tools") or any("tool_calls" in message for message in chat["messages"]):
        raise Unusable("tool calls")
    names: dict[str, Any] = {"tool": "ipython", "developer": "system"}
    return [
        Message(names.get(m["role"], m["role"]), m["content"], masked=m["masked"])
        for m in chat["messages"]
    ]
