"""Instruction and chat datasets: each row is a conversation.

Items are `{"tokens": list[int], "labels": list[int]}` of equal length. Labels are -100 where a
token is not trained, and they are *not* shifted. The builders of torchtune 0.6.1 give the same
items, so `torchtune.datasets.alpaca_dataset` and others work with `qfsdp.data.StepLoader` too.

Rows are tokenized when the dataset is built, because some rows turn out to be unusable. The number
of samples and of steps per epoch is then known, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from string import Formatter
from typing import TYPE_CHECKING, Any

from qfsdp.cli.errors import UserError
from qfsdp.data.loader import IGNORE_INDEX
from qfsdp.data.rows import Row, load_rows, require_column
from qfsdp.data.tokenized_dataset import Sample, TokenizedDataset, Unusable, tokenize_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from torchtune.data import Message

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "ipython",
    "ipython": "ipython",
}
"""Role in OpenAI's or ShareGPT's format -> role in torchtune."""

Tokenizer = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A torchtune tokenizer or `HFTokenizer`: `{"messages": list[Message]}` -> `{"tokens", "mask"}`."""


def instruct_dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
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
        source: a .jsonl, .json, .parquet or .csv file, a folder of them, or a hub name.
        split, subset, data_files: as in `load_rows`.
        prompt_column: column with the prompt. Ignored if `prompt_template` is given.
        answer_column: column with the answer.
        system_prompt: a system message for every row.
        prompt_template: format string that makes the prompt from columns, such as
            "{instruction}\\n{input}". White space around the result is removed.
        train_on_input: train on the prompt as well, but never on `system_prompt`.
        max_rows: use only the first `max_rows` rows.

    Raises:
        UserError: the source, a column or the template is wrong, or no row can be used.
    """
    from torchtune.data import Message

    rows = load_rows(source, split, subset, data_files, max_rows)
    if prompt_template is None:
        require_column("prompt_column", prompt_column, rows, source)
    else:
        for column in _template_columns(prompt_template):
            require_column("prompt_template", column, rows, source)
    require_column("answer_column", answer_column, rows, source)

    def to_messages(row: Row) -> list[Message]:
        if prompt_template is None:
            prompt = _text(row[prompt_column])
        else:
            texts = {key: "" if value is None else value for key, value in row.items()}
            prompt = prompt_template.format(**texts).strip()
        messages = [
            Message("user", prompt, masked=not train_on_input),
            Message("assistant", _answer(row[answer_column])),
        ]
        if system_prompt is not None:
            messages.insert(0, Message("system", system_prompt, masked=True))
        return messages

    return _tokenize(tokenizer, rows, to_messages, source)


def chat_dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    messages_column: str = "messages",
    train_on_input: bool = False,
    train_on_last_turn_only: bool = False,
    max_rows: int | None = None,
) -> TokenizedDataset:
    """Conversations: each row has a list of messages.

    Messages have OpenAI's format `{"role", "content"}` or ShareGPT's format `{"from", "value"}`.
    A message with `weight` 0 is not trained. Skips rows with tool calls, without an answer, with
    an empty answer, or without a trained token within the tokenizer's `max_seq_len`. One log line
    counts them.

    Args:
        tokenizer, source, split, subset, data_files, max_rows: as in `instruct_dataset`.
        messages_column: column with the messages.
        train_on_input: train on all messages instead of the assistant's only.
        train_on_last_turn_only: train only on the last answer. Needed for chat templates that
            rewrite earlier turns, for example to remove earlier reasoning.

    Raises:
        UserError: the source, the column or a role is wrong, or no row can be used.
    """
    rows = load_rows(source, split, subset, data_files, max_rows)
    require_column("messages_column", messages_column, rows, source)
    options = (train_on_input, train_on_last_turn_only)
    return tokenize_conversations(
        tokenizer, rows, source, lambda row: row[messages_column] or [], *options
    )


def tokenize_conversations(
    tokenizer: Tokenizer,
    rows: Dataset,
    source: str,
    turns_of: Callable[[Row], Sequence[Row]],
    train_on_input: bool,
    train_on_last_turn_only: bool,
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

    def to_messages(row: Row) -> list[Message]:
        messages = [_to_message(message, train_on_input) for message in turns_of(row)]
        answers = [message for message in messages if message.role == "assistant"]
        if not answers:
            raise Unusable("no answer")
        if train_on_last_turn_only:
            for message in answers[:-1]:
                message.masked = True
        return messages

    return _tokenize(tokenizer, rows, to_messages, source)


def _template_columns(template: str) -> list[str]:
    try:
        columns = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"dataset.prompt_template: {template!r}: {error}") from error
    if not columns:
        raise UserError(
            f"dataset.prompt_template: {template!r} names no column; "
            "expected column names in braces, such as {question}"
        )
    return columns


def _text(value: Any) -> str:
    """A table cell as text. Null becomes "" and a number its digits."""
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    raise UserError(f"a {type(value).__name__}: {str(value)[:60]!r}; expected text")


def _answer(value: Any) -> str:
    text = _text(value)
    if not text.strip():
        raise Unusable("an empty answer")
    return text


def _to_message(message: Row, train_on_input: bool) -> Message:
    """A message in OpenAI's or ShareGPT's format as a torchtune message."""
    from torchtune.data import Message

    if message.get("tool_calls"):
        raise Unusable("tool calls")
    given = message.get("role") or message.get("from")
    role: Any = ROLES.get(str(given))
    if role is None:
        raise UserError(
            f"a message with role {given!r}; expected the keys role and content, or from and "
            f"value, with one of the roles {', '.join(ROLES)}"
        )
    content = message.get("content") if message.get("role") else message.get("value")
    if isinstance(content, list):  # OpenAI's list of parts
        if any(part.get("type") != "text" for part in content):
            raise Unusable("content that is not text")
        content = "".join(part["text"] for part in content)
    text = _answer(content) if role == "assistant" else _text(content)
    trained = (train_on_input or role == "assistant") and message.get("weight") != 0
    return Message(role, text, masked=not trained)


def _tokenize(
    tokenizer: Tokenizer,
    rows: Dataset,
    to_messages: Callable[[Row], list[Message]],
    source: str,
) -> TokenizedDataset:
    """Turns every row into one sample."""
    max_seq_len: int | None = getattr(tokenizer, "max_seq_len", None)

    def samples_of(row: Row) -> Iterator[Sample]:
        sample = tokenizer({"messages": to_messages(row)})
        tokens, mask = sample["tokens"], sample["mask"]
        labels = [IGNORE_INDEX if m else t for t, m in zip(tokens, mask, strict=True)]
        # The first label is not a target: no token comes before it.
        if all(label == IGNORE_INDEX for label in islice(labels, 1, None)):
            raise Unusable(f"no trained token (max_seq_len {max_seq_len})")
        yield tokens, labels

    return tokenize_rows(rows, source, samples_of, max_seq_len)
