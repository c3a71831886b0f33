"""Messages and tool calls as datasets have them, in the one form that chat templates read.

    {"role": "user", "content": "Weather in Paris?"}
    {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]}
    {"role": "tool", "name": "weather", "content": "18 degrees"}

Keys with None of a message or a call are left out, except the content of a message. In arguments
and schemas null is a value like others. Parquet files and the `datasets` library give every row all
keys that any row has, with None for those that are missing: `unfilled` removes these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.files.file_rows import FileRow
from qfsdp.data.files.json_lines import value_of

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
"""Role in OpenAI's, ShareGPT's, ms-swift's or Gemini's format, in small letters -> role of a chat
template."""

_CALLS = ("function_call", "tool_call")
"""Roles whose text is a call, or a list of them, in JSON: ShareGPT's, ms-swift's."""

_ELSEWHERE = ("text", "message", "content", "contents", "value", "parts", "output", "result")
"""Keys, in small letters, that may hold a message's text where `content` has nothing."""

_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys of a call's arguments: OpenAI's, Llama 3's, LangChain's, Anthropic's."""

_OWN_KEYS = ("role", "content", "from", "value", "refusal", "function_call", "tool_calls")
_CHOOSES = ("weight", "train", "training", "loss")
"""Keys that say whether a message is trained: OpenAI's, ours, Axolotl's, ms-swift's."""

_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
_CHOOSES_PARTS = ("train_detail", "loss_scale")


def as_message(turn: Any) -> dict[str, Any]:
    """A message in OpenAI's or ShareGPT's format, in the form of chat templates.

    Keys that are not named here, such as `reasoning_content`, pass as they are. The arguments of
    tool calls become objects; OpenAI's are JSON text. `function_call` and the role `function`,
    OpenAI's older names, become `tool_calls` and `tool`, as do ShareGPT's roles `function_call`
    (whose value is a call, or a list of them, in JSON) and `observation`, and ms-swift's
    `tool_call` and `tool_response`.

    Raises:
        UserError: it is no message, its text stands in another key, or its content has parts that
            are not text.
    """
    if not isinstance(turn, Mapping):
        kind = type(turn).__name__
        raise UserError(
            f"a message that is a {kind}: {str(turn)[:60]!r}; expected an object with role and "
            "content"
        )
    openai, given = bool(turn.get("role")), _role(turn)
    role = ROLES.get(name := str(given).lower())
    if role is None:
        raise UserError(
            f"a message with role {given!r}; expected the keys role and content, or from and "
            f"value, with one of the roles {', '.join(ROLES)}"
        )
    names = ("content", "value") if openai else ("value", "content")
    content = next((turn[name] for name in names if turn.get(name) is not None), None)
    calls = turn.get("tool_calls")
    if content in (None, "", []) and openai:  # OpenAI's API has the text of a refusal beside it
        content = turn.get("refusal") or content
    if name in _CALLS:
        calls, content = from_json(f"a {name}", content), None
        calls = calls if isinstance(calls, list) else [calls]
    elif not calls and turn.get("function_call"):
        calls = [{"type": "function", "function": turn["function_call"]}]
    if content is None and not calls:
        held = (k for k in turn if str(k).lower() in _ELSEWHERE and turn[k] not in (None, "", []))
        if (key := next(held, None)) is not None:
            text = f"a message of the role {given!r} whose text stands in {key!r}"
            raise UserError(f"{text}: {str(turn[key])[:60]!r}; expected the key {names[0]}")
    own = (*_OWN_KEYS, *_CHOOSES, *_CHOOSES_PARTS, "masked")
    kept = {key: value for key, value in _given(turn).items() if key not in own}
    message = {"role": role, "content": _content(content), **kept}
    if calls:
        message["tool_calls"] = _tool_calls(calls)
    elif content is None:
        message["content"] = ""
    return message


def _role(turn: Mapping[str, Any]) -> Any:
    return turn.get("role") or turn.get("from")


def as_messages(
    turns: Sequence[Any], convert: Callable[[Any], dict[str, Any]] = as_message
) -> list[dict[str, Any]]:
    """The messages of turns, each made by `convert`.

    A turn that is a call becomes a part of the assistant's message right before it. A text and its
    calls are one answer, so its end is written after the last of them.
    """
    found: list[dict[str, Any]] = []
    for turn, message in zip(turns, list(map(convert, turns)), strict=True):
        last = found[-1] if found else {}
        one = last.get("role") == "assistant" and last.get("masked") == message.get("masked")
        if one and str(_role(turn)).lower() in _CALLS:
            calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
            found[-1] = last | {"tool_calls": calls}
        else:
            found.append(message)
    return found


def may_train(turn: Mapping[str, Any]) -> bool:
    """Whether a message may be trained: `weight`, `train`, `training`, `loss` are not 0 or false.
    Raises UserError: one of them is neither true, false, 0, 1 nor null; or a key chooses parts of
    the message or their weights, as `train_detail` of Axolotl and `loss_scale` of ms-swift do."""
    for key in _CHOOSES_PARTS:
        if turn.get(key) is not None:
            raise UserError(
                f"{key}: {str(turn[key])[:60]!r} of a message: parts of a message are not chosen; "
                'expected "train": true or false'
            )
    for key in _CHOOSES:
        if turn.get(key) not in (None, True, False):  # 1 and 0 equal true and false
            raise UserError(f"{key}: {str(turn[key])[:60]!r} of a message; expected true or false")
    return all(turn.get(key) in (None, True) for key in _CHOOSES)


def as_tools(value: Any) -> list[Any] | None:
    """The functions that the assistant may call: a list of JSON schemas, or None if there are none.

    Args:
        value: a list of schemas, or JSON text of one. A schema has OpenAI's form
            `{"type": "function", "function": {"name": ...}}` or is the inner object alone.

    Raises:
        UserError: it is something else.
    """
    tools = None if value == "" else from_json("tools", value)
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UserError(f"tools: {str(value)[:60]!r}; expected a list of functions")
    for number, tool in enumerate(tools, start=1):
        if function_name(tool) is None:
            raise UserError(
                f"tools: entry {number}: {str(tool)[:60]!r}; expected an object with the "
                "function's name"
            )
    return tools or None


def function_name(entry: Any) -> str | None:
    """The name of the function in a tool or a tool call, or None if it has none."""
    inner = entry.get("function", entry) if isinstance(entry, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) and name else None


def unfilled(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row; one of a table without the keys in its values that are None, at any depth."""
    if isinstance(row, FileRow) and row.file.suffix != ".parquet":
        return row
    return {name: _without_none(value) for name, value in row.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in _given(value).items()}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if inner is not None}


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise UserError(f"tool_calls: {str(calls)[:60]!r}; expected a list of calls")
    found = []
    for number, call in enumerate(calls, start=1):
        place = f"tool_calls: call {number}"
        if function_name(call) is None:
            raise UserError(
                f"{place}: {str(call)[:60]!r}; expected an object with the function's name"
            )
        call = _given(call)
        inner = _given(call.get("function", call))
        held = (name for keys in (inner, call) for name in _ARGUMENTS if name in keys)
        name = next(held, None)
        if name is None and any(isinstance(value, Mapping) for value in inner.values()):
            raise UserError(f"{place}: {str(inner)[:60]!r}; expected the key arguments")
        name = name or "arguments"
        arguments = inner.get(name, call.get(name))
        inner = {"arguments" if key == name else key: given for key, given in inner.items()}
        if isinstance(arguments, str) and arguments.strip():
            arguments = from_json(f"{place}: arguments", arguments)
        if not isinstance(arguments or {}, dict):
            raise UserError(f"{place}: arguments: {str(arguments)[:60]!r}; expected a JSON object")
        inner = {**inner, "arguments": arguments or {}}
        found.append({**call, "function": inner} if "function" in call else inner)
    return found


def from_json(place: str, value: Any) -> Any:
    """What JSON text says; a value that is no text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return value_of(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: {value[:60]!r}: not valid JSON: {error}") from None


def holds_messages(value: Any) -> bool:
    """Whether a cell is text that begins as messages do: JSON, or what pandas wrote."""
    return isinstance(value, str) and _MESSAGES.match(value) is not None


def _content(content: Any) -> str | None:
    if isinstance(content, list):  # OpenAI's list of parts
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        kinds = [part.get("type") for part in parts]
        if others := [kind for kind in kinds if kind not in ("text", "refusal")]:
            raise UserError(f"content that is not text ({others[0]!r}); expected text alone")
        return "".join(text_of(part.get(kind)) for part, kind in zip(parts, kinds, strict=True))
    return None if content is None else text_of(content)


def text_of(value: Any) -> str:
    """The text of a value in a row: the one rule of training, generation and evaluation.

    Text stays as it is, and null and NaN are "". Numbers, true and false are written as in the JSON
    of the row (5, 5.00, 1e5, true); those of Parquet with the fewest digits that give the same
    number; dates in the form of ISO 8601. Raises UserError: it is a list, an object or bytes."""
    if isinstance(value, str):
        return value
    if value is None or value != value:  # only NaN differs from itself
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal | date | time):
        return str(value)
    raise UserError(f"a {type(value).__name__}: {str(value)[:60]!r}; expected text")
