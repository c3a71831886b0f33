"""Instruction and chat datasets: rows of a file or of the hub, as tokens and labels.

Items are `{"tokens": list[int], "labels": list[int]}` of equal length, labels -100 where not
trained and *not* shifted: the items of torchtune 0.6.1's own builders, so that
`torchtune.datasets.alpaca_dataset` and the like work with `qfsdp.data.StepLoader` too.

Rows are tokenized when the dataset is built. Only then is it known which rows can be used at
all, hence the number of samples and of steps per epoch, and it is the same on every rank.
"""

from __future__ import annotations

import json
import logging
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from qfsdp.data.loader import IGNORE_INDEX
from qfsdp.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from torchtune.data import Message

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
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

Row = Mapping[str, Any]
Tokenizer = Callable[[dict[str, Any]], Mapping[str, Any]]
"""`{"messages": list[Message]}` -> `{"tokens": ..., "mask": ...}`: torchtune's or `HFTokenizer`."""

log = logging.getLogger("qfsdp")


class TokenizedDataset:
    """Samples in flat arrays: 8 bytes per token, where lists of Python ints take over 60.

    Fields:
        tokens: int32 `[total]`, all samples one after the other.
        labels: int32 `[total]`, the token or -100.
        ends: int64 `[samples]`, where each sample ends.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.labels = array("i")
        self.ends = array("q")

    def append(self, tokens: list[int], labels: list[int]) -> None:
        """Add one sample."""
        self.tokens.extend(tokens)
        self.labels.extend(labels)
        self.ends.append(len(self.tokens))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [end - start for start, end in zip([0, *self.ends], self.ends, strict=False)]

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        index = range(len(self))[index]  # negative indices, and IndexError
        chosen = slice(self.ends[index - 1] if index else 0, self.ends[index])
        return {"tokens": self.tokens[chosen].tolist(), "labels": self.labels[chosen].tolist()}


class _Unusable(Exception):
    """A row that cannot be trained on; the message says what is wrong with it."""


def instruct_dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    split: str = "train",
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
        split: as in `datasets.load_dataset`; a file has only "train" and slices of it.
        data_files: which files of a folder or hub dataset.
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

    rows = _load_rows(source, split, data_files, max_rows)
    if prompt_template is None:
        _require_column("prompt_column", prompt_column, rows, source)
    else:
        for column in _template_columns(prompt_template):
            _require_column("prompt_template", column, rows, source)
    _require_column("answer_column", answer_column, rows, source)

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
        tokenizer, source, split, data_files, max_rows: as in `instruct_dataset`.
        messages_column: column with the messages.
        train_on_input: train on every message, not only on the assistant's.
        train_on_last_turn_only: train on the last answer only; for chat templates that rewrite
            earlier turns, such as those that remove earlier reasoning.

    Raises:
        UserError: the source, the column or a role is wrong, or no row can be used.
    """
    if train_on_input and train_on_last_turn_only:
        raise UserError(
            "train_on_last_turn_only: true together with train_on_input; at most one is right"
        )
    rows = _load_rows(source, split, data_files, max_rows)
    _require_column("messages_column", messages_column, rows, source)

    def to_messages(row: Row) -> list[Message]:
        messages = [_to_message(message, train_on_input) for message in row[messages_column] or []]
        answers = [message for message in messages if message.role == "assistant"]
        if not answers:
            raise _Unusable("no answer")
        if train_on_last_turn_only:
            for message in answers[:-1]:
                message.masked = True
        return messages

    return _tokenize(tokenizer, rows, to_messages, source)


def check_source(key: str, source: str) -> None:
    """Find what is wrong with a dataset's source without loading it or using the network.

    What has a known suffix, starts with `/`, `.` or `~`, or has more than one `/` is taken for a
    local path; the rest, where no such file exists, for a hub name.

    Raises:
        UserError: in one line that starts with `key`: a local path does not exist, is empty, or
            is not of a known kind.
    """
    path = Path(source).expanduser()
    right = f"a {', '.join(SUFFIXES)} file, a folder of them or a hub name is right"
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{key}: {source} has the unknown suffix {path.suffix!r}; {right}")
        if path.stat().st_size == 0:
            raise UserError(f"{key}: {source} is empty; {right}")
    elif path.is_dir() and source:
        if not any(_data_files(path)):
            raise UserError(f"{key}: {source} holds no data file; {right}")
    elif path.suffix in SUFFIXES or source[:1] in "/.~" or source.count("/") > 1:
        raise UserError(f"{key}: {source or 'an empty name'} does not exist; {right}")


def _data_files(path: Path) -> Iterator[Path]:
    """The data files of a folder, or `path` itself if it is one."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return (file for file in files if file.suffix in SUFFIXES)


def _load_rows(source: str, split: str, data_files: str | None, max_rows: int | None) -> Dataset:
    """The rows of `source`; raises UserError for everything that a user can get wrong."""
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    if max_rows is not None and max_rows < 1:
        raise UserError(f"dataset.max_rows: {max_rows}; at least 1, or null for all, is right")
    if source in SUFFIXES.values() and data_files:  # torchtune's way to name a local file
        source, data_files = data_files, None
    check_source("dataset.source", source)
    if not sys.stderr.isatty():
        disable_progress_bars()  # in a log file every update of a bar is a line
    path = Path(source).expanduser()
    try:
        if path.is_file():
            if data_files is not None:
                raise UserError(
                    f"dataset.data_files: {data_files} beside the single file {source}; "
                    "only a folder or a hub dataset has data files to choose from"
                )
            rows = load_dataset(SUFFIXES[path.suffix], data_files=str(path), split=split)
        else:
            name = str(path) if path.is_dir() else source
            rows = load_dataset(name, data_files=data_files, split=split)
    except (DatasetsError, ValueError, OSError) as error:
        for file in _data_files(path) if path.exists() else ():
            if SUFFIXES[file.suffix] == "json":
                _check_json(file)
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"dataset.source: {source}, split {split}: {reason[0]}") from error
    return rows.select(range(min(max_rows or len(rows), len(rows))))


def _check_json(file: Path) -> None:
    """Raise a UserError that names the first line that is not JSON, if there is one."""
    text = file.read_text(encoding="utf-8-sig")
    whole = text.lstrip().startswith("[")
    for number, document in [(1, text)] if whole else enumerate(text.split("\n"), start=1):
        try:
            if document.strip():
                json.loads(document)
        except json.JSONDecodeError as error:
            line = number + error.lineno - 1
            raise UserError(f"{file}, line {line}: not valid JSON: {error.msg}") from error


def _require_column(key: str, column: str, rows: Dataset, source: str) -> None:
    if column in rows.column_names:
        return
    nearest = sorted(
        rows.column_names,
        key=lambda name: SequenceMatcher(None, column.lower(), name.lower()).ratio(),
        reverse=True,
    )
    raise UserError(
        f"dataset.{key}: no column {column!r} in {source}; its columns are {', '.join(nearest)}"
    )


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
        raise _Unusable("an empty answer")
    return text


def _to_message(message: Row, train_on_input: bool) -> Message:
    """A torchtune message of an OpenAI or ShareGPT one."""
    from torchtune.data import Message

    if message.get("tool_calls"):
        raise _Unusable("tool calls")
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
            raise _Unusable("content that is not text")
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
    """Tokenize all rows and log, once, what was left out or may be cut."""
    dataset = TokenizedDataset()
    left_out: Counter[str] = Counter()
    max_seq_len: int | None = getattr(tokenizer, "max_seq_len", None)
    for number, row in enumerate(rows, start=1):
        try:
            sample = tokenizer({"messages": to_messages(row)})
            tokens, mask = sample["tokens"], sample["mask"]
            labels = [IGNORE_INDEX if m else t for t, m in zip(tokens, mask, strict=True)]
            # The first label is nobody's target.
            if all(label == IGNORE_INDEX for label in islice(labels, 1, None)):
                raise _Unusable(f"no trained token (max_seq_len {max_seq_len})")
            dataset.append(tokens, labels)
        except _Unusable as reason:
            left_out[str(reason)] += 1
        except (UserError, ValueError) as error:  # torchtune's chat templates raise ValueError
            raise UserError(f"dataset.source: {source}, row {number}: {error}") from error
    reasons = ", ".join(f"{count} with {reason}" for reason, count in left_out.items())
    if not len(dataset):
        raise UserError(
            f"dataset.source: {source}: none of {len(rows)} rows can be used: "
            f"{reasons or 'there are none'}"
        )
    full = sum(length == max_seq_len for length in dataset.lengths)
    log.log(
        logging.WARNING if left_out or full else logging.INFO,
        "%s: %d of %d rows used, %d tokens%s%s",
        source,
        len(dataset),
        len(rows),
        len(dataset.tokens),
        f"; left out: {reasons}" if reasons else "",
        f"; {full} reach max_seq_len {max_seq_len} and may be cut" if full else "",
    )
    return dataset
