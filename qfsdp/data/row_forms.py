"""What form rows have, and the keys that read it: chats, pairs of texts, preferences, documents."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component, passed_by_name
from qfsdp.data.files.data_files import is_saved, listed
from qfsdp.data.files.file_rows import FilePart, FileRows, FileStream
from qfsdp.data.files.rows import require_column

LOOKED_AT = 100  # rows
PROMPTS = (
    *("prompt", "instruction", "question", "query", "problem", "user", "human", "input"),
    *("source", "text", "article", "document", "dialogue"),
)
ANSWERS = (
    *("answer", "output", "response", "completion", "solution", "assistant", "reply", "target"),
    *("summary", "label"),
)
BESIDE = ("input", "context")  # what a prompt is about, in a column of its own: Alpaca's, Dolly's
SYSTEM = ("system", "system_prompt")
CHATS = ("messages", "conversations", "conversation", "chat", "turns", "dialog", "dialogue")
EMPTY: tuple[Any, ...] = (None, "", [])
TEXTS = (str, int, float, Decimal, date, time)  # what `text_of` writes as text
TRUTH = {
    "true": True,
    "false": False,
    "1": True,
    "0": False,
    "1.0": True,
    "0.0": False,
}  # of labels
MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # which ids are trained
IDS = ("input_ids", "labels", *MASKS, "attention_mask", "position_ids")
_ANSWERERS = ("assistant", "gpt", "model")
_REQUIRED = (
    *("messages_column", "text_column", "chosen_column", "rejected_column", "completion_column"),
    *("label_column", "answer_column"),
)


@dataclass
class Form:
    """A form of rows.

    Fields:
        name: in words.
        builder: the dataset of `qfsdp.data` that reads it.
        keys: its arguments that are not the builder's defaults.
        read: the columns that are read.
        unread: those that are not.
    """

    name: str
    builder: str
    keys: dict[str, str] = field(default_factory=dict)
    read: Collection[str] = ()
    unread: Sequence[str] = ()

    @property
    def line(self) -> str:
        """What is read, in a line."""
        parts = [self.name, *map(": ".join, self.keys.items())]
        return "; ".join(parts) + f"; not read: {', '.join(self.unread)}" * bool(self.unread)

    def words(self, key: str, dataset: Component) -> list[str]:
        """The words of a command line, quoted for a shell, that make `dataset` read this form."""
        path = f"qfsdp.data.{self.builder}"
        words = [] if dataset.path == path else [f"{key}._component_={path}"]
        words += [quote(f"{key}.{name}={value}") for name, value in self.keys.items()]
        known = passed_by_name(Component(path).resolve())
        stale = {*_REQUIRED, "prompt_column", "prompt_template"} - {*self.keys}
        for name in dataset.kwargs:
            if name not in known or name in stale:
                words.append(quote(f"~{key}.{name}"))
        return words


def form_of(row: Mapping[str, Any]) -> Form | None:
    """The form of a row, by the names of its columns and the kinds of their values.

    Args:
        row: a row, or the `typical` one of several.
    """
    if _of_a_service(row):
        return None
    lower = {name.strip().lower(): name for name in row}
    before = _before(row, lower)
    if (form := _preferences(row, lower, before)) is not None:
        return form
    for name in (*CHATS, *lower):
        value: Any = row.get(lower.get(name, ""))
        usual = name in CHATS
        if (usual and _holds_rows(value)) or (not usual and _holds_messages(name, value)):
            kind = "conversations" if "role" in value[0] else "conversations in ShareGPT's form"
            before.pop("history_column", None)
            return _form(kind, "chat_dataset", {"messages_column": lower[name]}, before)
    if _is_ids(row.get("input_ids")):
        return Form("token ids", "pretokenized_dataset", {}, IDS)
    texts = [name for name in lower if isinstance(row[lower[name]], TEXTS)]
    answer = next((name for name in ANSWERS if name in texts), None)
    prompts = [name for name in PROMPTS if name in texts and name != answer]
    if answer and prompts:
        said = {name: str(row[lower[name]]) for name in (*prompts, answer)}
        prompt = _bare(prompts, said, answer)
        keys = {"prompt_column": lower[prompt], "answer_column": lower[answer]}
        form = _form("prompts with answers", "instruct_dataset", keys, before)
        return _with_beside(form, row, lower, prompt)
    texts = [name for name in texts if isinstance(row[lower[name]], str)]
    documents = next((n for n in ("text", "content", "document", "body") if n in texts), None)
    if documents or (len(texts) == len(row) == 1 and texts[0] not in CHATS):
        column = lower[documents or texts[0]]
        return _form("documents", "text_dataset", {"text_column": column}, {})
    return None


def _preferences(
    row: Mapping[str, Any], lower: Mapping[str, str], before: dict[str, str]
) -> Form | None:
    """The form of answers with labels or in pairs, also in those of LLaMA-Factory and ms-swift;
    None: neither."""
    prompt = next((name for name in PROMPTS if name in lower), None)
    chats = next((lower[n] for n in CHATS if _holds_rows(row.get(lower.get(n, "")))), None)
    for name in ("label", "kto_tag"):
        value = row.get(lower.get(name, ""))
        answers = ("completion",) if name == "label" else tuple(n for n in ANSWERS if n != "label")
        answer = next((lower[n] for n in answers if n in lower), None)
        keys = {
            "prompt_column": lower.get(prompt or "", "null"),
            "label_column": lower.get(name, ""),
        }
        if str(value).lower() in TRUTH and answer and prompt in lower:
            form = _form(
                "answers with labels", "kto_dataset", keys | {"completion_column": answer}, before
            )
            return _with_beside(form, row, lower, prompt)
        if isinstance(value, bool) and chats:
            keys |= {"prompt_column": "null", "completion_column": chats}
            return _form("answers with labels", "kto_dataset", keys, before)
    chosen, rejected = lower.get("chosen"), lower.get("rejected")
    if chats and "rejected_messages" in lower:
        chosen, rejected, prompt = chats, lower["rejected_messages"], None
    if chosen is None or rejected is None:
        return None
    first = row[chosen][0] if _holds_rows(row[chosen]) else row[chosen]
    alone = isinstance(first, Mapping) and str(first.get("role") or first.get("from")) in _ANSWERERS
    asked = lower[prompt] if prompt else chats if chats and alone else "null"
    keys = {"prompt_column": asked, "chosen_column": chosen, "rejected_column": rejected}
    return _with_beside(
        _form("preference pairs", "preference_dataset", keys, before), row, lower, prompt
    )


def _with_beside(
    form: Form, row: Mapping[str, Any], lower: Mapping[str, str], prompt: str | None
) -> Form:
    """Adds the column that a text prompt is about, such as `input` beside `instruction`."""
    texts = [name for name in BESIDE if isinstance(row.get(lower.get(name, "")), TEXTS)]
    beside = next((name for name in texts if name != prompt), None)
    if beside and prompt and isinstance(row[lower[prompt]], TEXTS):
        columns = f"{{{lower[prompt]}}}\\n{{{lower[beside]}}}"
        form.keys.pop("prompt_column", None)
        form.keys = {"prompt_template": f'"{columns}"'} | form.keys
        form.read = {*form.read, lower[beside]}
    return form


def _bare(prompts: Sequence[str], texts: Mapping[str, str], answer: str) -> str:
    """The first of `prompts` that is not the whole sample. Some files have a column with prompt and
    answer in one text beside those of its parts; as a prompt it would give the answer away."""
    for name in prompts:
        others = [texts[other] for other in prompts if other != name and texts[other]]
        if texts[answer] not in texts[name] or not any(text in texts[name] for text in others):
            return name
    return prompts[0]


def _form(name: str, builder: str, keys: dict[str, str], before: dict[str, str]) -> Form:
    """A form with keys that name columns; `keys` that a builder takes by itself are left out."""
    kept = {key: value for key, value in keys.items() if value != key.removesuffix("_column")}
    kept = {key: _as_yaml(value) for key, value in (kept | before).items()}
    return Form(name, builder, kept, {*keys.values(), *before.values(), "tools"})


def _as_yaml(column: str) -> str:
    """A column as a config writes it: "Answer ", "yes" and "Q: 1" in quotes; `null` is none."""
    with suppress(yaml.YAMLError):
        if column == "null" or yaml.safe_load(column) == column:
            return column
    return json.dumps(column, ensure_ascii=False)


def _before(row: Mapping[str, Any], lower: Mapping[str, str]) -> dict[str, str]:
    """The keys of columns with what comes before a prompt: a system message, earlier turns."""
    found: dict[str, str] = {}
    for name in SYSTEM:
        if isinstance(row.get(lower.get(name, "")), str):
            found.setdefault("system_column", lower[name])
    if isinstance(row.get(lower.get("history", "")), list):
        found["history_column"] = lower["history"]
    return found


def typical(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All columns of some rows, each with its first value that is not empty: Alpaca's first rows
    have no input, which later rows have."""
    found: dict[str, Any] = {}
    for row in rows:
        found |= {name: value for name, value in row.items() if found.get(name) in EMPTY}
    return found


def first_rows(source: Any) -> list[Mapping[str, Any]]:
    """The first rows of a file, or of the first file of a folder; none of a hub name."""
    files = _files(source)[:1]
    return list(islice(FileStream(files), LOOKED_AT)) if files else []


def _files(source: Any) -> list[Path]:
    path = Path(str(source)).expanduser()
    if path.is_dir():
        return [] if is_saved(path) else listed(path)[0]
    return [path] if path.is_file() else []


def has_splits(source: str) -> bool:
    """Whether a folder has files of several splits by their names, as on the hub: rows of the test
    are not for training."""
    names = [file.stem.lower() for file in _files(source)] if Path(source).is_dir() else []
    held = any(name.startswith(("test", "val", "dev", "eval")) for name in names)
    return held and any(name.startswith("train") for name in names)


def check_columns_of(key: str, dataset: Component) -> None:
    """Looks at the first rows of a local file for the columns that a dataset of ours needs.

    Args:
        key: the dataset's place in the config, for the message.

    Raises:
        UserError: they have not all of them; the message has the words that read these rows.
    """
    source = dataset.kwargs.get("source")
    if not dataset.path.startswith("qfsdp.data.") or not isinstance(source, str):
        return
    if dataset.kwargs.get("data_files") is not None:
        return
    rows = first_rows(source)
    for name, column in _needed(dataset) if rows else ():
        if any(column in row for row in rows):
            continue
        try:
            require_column(name, column, FileRows([FilePart(f) for f in _files(source)]), source)
        except UserError as error:
            text = str(error).replace("dataset.", f"{key}.", 1)
            row = typical(rows)
            if (form := form_of(row)) is not None and (words := form.words(key, dataset)):
                raise UserError(f"{text}; these are {form.name}: {' '.join(words)}") from None
            raise UserError(text + wrapped(row)) from None


def _needed(dataset: Component) -> Iterator[tuple[str, str]]:
    """The builder's arguments that name columns which all files must have, and the columns."""
    from qfsdp.data.conversations import prompt_columns  # needs torch

    given, known = dataset.kwargs, passed_by_name(dataset.resolve())
    template = given.get("prompt_template", _default(known, "prompt_template"))
    if isinstance(template, str):  # also of presets, such as `alpaca_dataset`
        yield from (("prompt_template", c) for c in prompt_columns("", template)[1])
    elif isinstance(column := given.get("prompt_column", _default(known, "prompt_column")), str):
        yield "prompt_column", column
    for name in _REQUIRED:
        if isinstance(column := given.get(name, _default(known, name)), str):
            yield name, column


def _default(known: Mapping[str, Any], name: str) -> Any:
    return known[name].default if name in known else None


def wrapped(row: Mapping[str, Any]) -> str:
    """What to type if the rows have no form because something is wrapped around or between their
    messages; else ""."""
    if change := _of_a_service(row):
        return f"; to have messages: jq -c '{change}' FILE > rows.jsonl"
    lists = [name for name, value in row.items() if _holds_rows(value)]
    if lists and len(lists) == len(row):
        name = "train" if "train" in lists else lists[0]
        if len(lists) == 1 or name == "train":
            return f"; the rows are inside the list {name!r}: jq -c '.{name}[]' FILE > rows.jsonl"
    numbered = [isinstance(value, Mapping) and "0" in value for value in row.values()]
    if (row and all(numbered)) or {*row} == {"columns", "index", "data"}:
        return "; pandas wrote columns; expected df.to_json(FILE, orient='records', lines=True)"
    for name, value in row.items():
        if name.lower() in CHATS and isinstance(value, str):
            change = f"jq -c '.{name} |= fromjson' FILE > rows.jsonl"
            return f"; {name!r} holds text, not messages; if it is JSON: {change}"
    prompt = next((name for name in lists if name.lower() in PROMPTS), None)
    answer = next((name for name in lists if name.lower() in ANSWERS), None)
    if prompt and answer:
        change = f"jq -c '.messages = .{prompt} + .{answer}' FILE > rows.jsonl"
        return f"; {prompt!r} and {answer!r} hold messages: {change}"
    for name, value in row.items():
        if name.lower() in (*PROMPTS, *ANSWERS) and isinstance(value, list | Mapping):
            kind = "a list" if isinstance(value, list) else "an object"
            return f"; {name!r} holds {kind}: {str(value)[:60]}; expected text"
    return ""


def _of_a_service(row: Mapping[str, Any]) -> str | None:
    """What makes messages of the rows that Google's and OpenAI's finetuning services and ms-swift
    take."""
    contents: Any = row.get("contents")
    if _holds_rows(contents) and "parts" in contents[0]:
        role = '(if .role == "model" then "assistant" else .role end)'
        text = "(.parts | map(.text) | add)"
        said = f"[.contents[] | {{role: {role}, content: {text}}}]"
        if "systemInstruction" in row:
            said = f'[.systemInstruction | {{role: "system", content: {text}}}] + {said}'
        return f"{{messages: ({said})}}"
    if isinstance(row.get("rejected_response"), str) and _holds_rows(row.get("messages")):
        answer = '[{role: "assistant", content: .rejected_response}]'
        return f"{{chosen: .messages, rejected: (.messages[:-1] + {answer})}}"
    if isinstance(row.get("input"), Mapping) and "preferred_output" in row:
        chosen, rejected = "(.input.messages + .preferred_output)", ".non_preferred_output"
        return f"{{chosen: {chosen}, rejected: (.input.messages + {rejected})}}"
    return None


def _holds_messages(name: str, value: Any) -> bool:
    """Whether a column of another name than usual holds whole conversations."""
    if name in (*PROMPTS, *ANSWERS, "history", "tools") or not _holds_rows(value):
        return False
    return any({*keys} <= {*value[0]} for keys in (("role", "content"), ("from", "value")))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, int) for n in value)


def _holds_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
