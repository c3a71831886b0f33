"""Instruction and chat datasets: rows of a file or of the hub, as tokens and labels.

Items are `{"tokens": list[int], "labels": list[int]}` of equal length, labels -100 where not
trained and *not* shifted: the items of torchtune 0.6.1's own builders, so that
`torchtune.datasets.alpaca_dataset` and the like work with `qfsdp.data.StepLoader` too.

Rows are tokenized when the dataset is built. Only then is it known which rows can be used at
all, hence the number of samples and of steps per epoch, and it is the same on every rank.
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
"""Roles in OpenAI's and ShareGPT's words -> torchtune's."""

Tokenizer = Callable[[dict[str, Any]], Mapping[str, Any]]
"""`{"messages": list[Message]}` -> `{"tokens": ..., "mask": ...}`: torchtune's or `HFTokenizer`."""


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
    """Pairs of prompt and answer, each as a chat of one user and one assistant message.

    Rows with an empty answer, or without a trained token within the tokenizer's `max_seq_len`,
    are left out and counted in one log line.

    Args:
        tokenizer: `hf_tokenizer(...)` or one of torchtune's.
        source: a .jsonl, .json, .parquet or .csv file, a folder of them, or a hub name.
        split, subset, data_files: as in `load_rows`.
        prompt_column: column with the prompt; not read if `prompt_template` is given.
        answer_column: column with the answer.
        system_prompt: a system message for every row.
        prompt_template: the prompt as a format string over columns, such as
            "{instruction}\\n{input}"; space around the result is removed.
        train_on_input: train on the prompt as well (never on `system_prompt`).
        max_rows: use the first so many rows only.

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
    """Conversations, one list of messages per row.

    Messages are OpenAI's `{"role", "content"}` (a `weight` of 0 leaves a message untrained) or
    ShareGPT's `{"from", "value"}`. Rows with an empty answer, with tool calls, without an answer
    or without a trained token within the tokenizer's `max_seq_len` are left out and counted in
    one log line.

    Args:
        tokenizer, source, split, subset, data_files, max_rows: as in `instruct_dataset`.
        messages_column: column with the messages.
        train_on_input: train on every message, not only on the assistant's.
        train_on_last_turn_only: train on the last answer only; for chat templates that rewrite
            earlier turns, such as those that remove earlier reasoning.

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
    """`chat_dataset` of rows whose messages, in one of its two forms, are `turns_of(row)`."""
    if train_on_input and train_on_last_turn_only:
        raise UserError(
            "dataset.train_on_last_turn_only: true together with train_on_input; "
            "at most one is right"
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
            "a column's name in braces, such as {question}, is right"
        )
    return columns


def _text(value: Any) -> str:
    """A cell as text; null is empty, a number is written out."""
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    raise UserError(f"a {type(value).__name__} where text is right: {str(value)[:60]!r}")


def _answer(value: Any) -> str:
    text = _text(value)
    if not text.strip():
        raise Unusable("an empty answer")
    return text


def _to_message(message: Row, train_on_input: bool) -> Message:
    """A torchtune message of an OpenAI or ShareGPT one."""
    from torchtune.data import Message

    if message.get("tool_calls"):
        raise Unusable("tool calls")
    theirs = message.get("role") or message.get("from")
    role: Any = ROLES.get(str(theirs))
    if role is None:
        raise UserError(
            f"a message with role {theirs!r}; keys role and content or from and value, "
            f"with a role of {', '.join(ROLES)}, are right"
        )
    content = message.get("content") if message.get("role") else message.get("value")
    if isinstance(content, list):  # OpenAI's parts
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
    """One sample for every row, which is a conversation."""
    max_seq_len: int | None = getattr(tokenizer, "max_seq_len", None)

    def samples_of(row: Row) -> Iterator[Sample]:
        sample = tokenizer({"messages": to_messages(row)})
        tokens, mask = sample["tokens"], sample["mask"]
        labels = [IGNORE_INDEX if m else t for t, m in zip(tokens, mask, strict=True)]
        # The first label is nobody's target.
        if all(label == IGNORE_INDEX for label in islice(labels, 1, None)):
            raise Unusable(f"no trained token (max_seq_len {max_seq_len})")
        yield tokens, labels

    return tokenize_rows(rows, source, samples_of, max_seq_len)
