"""Chat templates: conversations to text, rendered in another process with limits.

All templates of this process share one process of `template_process.py`. It is started for the
first template, and again after a template has made the system end it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError

SECONDS = 2  # of processor time for one conversation; a conversation of 4 MB takes 0.1
MEGABYTES = 1024
CHARACTERS = 2**25
_PROGRAM = Path(__file__).with_name("template_process.py")


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that hold an answer's reasoning. A template reads the first or the second."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template, and which of them are trained.

    Fields:
        messages: `{"role": ..., "content": ...}` each, with whatever else the template reads.
        trained: indices of the messages that are trained.
        tools: the functions that the assistant may call, as JSON schemas, or None.
        add_generation_prompt: end with the header that the template writes before an answer.
    """

    messages: Sequence[Mapping[str, Any]]
    trained: Sequence[int] = ()
    tools: Sequence[Any] | None = None
    add_generation_prompt: bool = False

    @classmethod
    def of(
        cls,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Conversation:
        """A conversation of messages. Those with `masked` false are trained. Of dicts that have no
        `masked`, the assistant's are trained."""
        trained = [index for index, message in enumerate(messages) if not _is_masked(message)]
        plain = [plain_message(message) for message in messages]
        return cls(plain, trained, tools, add_generation_prompt)

    def is_answer(self, index: int) -> bool:
        """Whether there is such a message, and it is the assistant's."""
        return 0 <= index < len(self.messages) and self.messages[index]["role"] == "assistant"


def plain_message(message: Any) -> dict[str, Any]:
    """A torchtune `Message` or a dict as a dict for the template, with text content.

    The content of a message with tool calls may be None. Raises UserError: there is no role, or no
    text."""
    if isinstance(message, Mapping):
        plain = {key: value for key, value in message.items() if key != "masked"}
    else:
        content = None if message.contains_media else message.text_content
        plain = {"role": message.role, "content": content}
    role, content = plain.get("role"), plain.get("content")
    no_text = content is None and plain.get("tool_calls")
    if not isinstance(role, str) or not (no_text or isinstance(content, str)):
        raise UserError(f"message {str(message)[:100]!r}; expected a role and text content")
    reasoning = next((plain[key] for key in REASONING if plain.get(key) is not None), None)
    if reasoning is not None:  # the same names as in transformers
        plain = {"thinking": reasoning, **plain, REASONING[0]: reasoning}
    # torchtune calls the result of a tool call "ipython", chat templates call it "tool".
    return plain | {"role": "tool" if role == "ipython" else role}


def _is_masked(message: Any) -> bool:
    if isinstance(message, Mapping):
        return bool(message.get("masked", message.get("role") != "assistant"))
    return bool(message.masked)


Range = tuple[int, int]
"""Start and end of a part of a text, in characters."""


class Rendered:
    """A conversation as text, and where its messages are in it.

    Attributes:
        text: the text.
        framed: whether `contents` has all messages whose content is in the text, except those
            with a <think>.
        turns: message -> what the template writes when its loop has come to the message. It is
            several parts, in order, if results of its calls stand between them.
        contents: message -> its content without white space around it.
        marked: what the template itself calls trained, in `{% generation %}`.
    """

    def __init__(
        self, text: str, marks: Sequence[tuple[int, str, int]] = (), framed: bool = False
    ) -> None:
        self.text, self.framed = text, framed
        self.turns: dict[int, list[Range]] = {}
        self.contents: dict[int, Range] = {}
        self.marked: list[Range] = []
        begun: dict[int, int] = {}
        current, since, trained = -1, 0, 0
        for at, kind, number in marks:
            if kind == "at":
                self._add_turn(current, since, at)
                current, since = number, at
            elif kind == "from":
                begun.setdefault(number, at)
            elif kind == "to" and number in begun:
                self.contents.setdefault(number, (begun[number], at))
            elif kind == "train":
                trained = at
            elif kind == "done":
                self.marked.append((trained, at))
        self._add_turn(current, since, len(text))

    def _add_turn(self, message: int, start: int, stop: int) -> None:
        """Adds a part of a message."""
        if message < 0 or start == stop:
            return
        parts = self.turns.setdefault(message, [])
        if parts and parts[-1][1] == start:
            start = parts.pop()[0]
        parts.append((start, stop))


class ChatTemplate:
    """A Jinja template that writes conversations as text.

    Args:
        text: the template.
        values: variables of the template besides the messages: texts of special tokens.
        source: the model folder or the template's file, for messages.
        with_tools: the template of conversations with tools, if that is another one.

    Raises:
        UserError: the template's syntax is wrong.
    """

    def __init__(
        self, text: str, values: Mapping[str, str], source: Path, with_tools: str | None = None
    ) -> None:
        self.text, self._values, self._source = text, dict(values), source
        self._templates = (text, with_tools or text)
        syntax: list[dict[str, Any]] = [{"messages": None, "tools": None}]
        syntax.append({"messages": None, "tools": []})
        for found in self._rendered(syntax):
            if isinstance(found, UserError):
                raise found

    @property
    def fingerprint(self) -> str:
        """The templates, with today's date if one of them may write it."""
        return repr((self._templates, date.today() if self.reads("strftime_now") else None))

    def reads(self, name: str) -> bool:
        """Whether the templates name a variable or key."""
        return any(name in text for text in self._templates)

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered | UserError]:
        """Renders conversations.

        Returns:
            For each its text; or an error, if the template rejects the conversation, fails, or
            exceeds a limit. After a limit of time or memory has ended the process, the remaining
            conversations are not tried: they have the same error.
        """
        return self._rendered(list(map(vars, conversations)))

    def _rendered(self, asked: Sequence[Mapping[str, Any]]) -> list[Rendered | UserError]:
        """As `render`; without messages only mistakes in the template's syntax are looked for."""
        found: list[Rendered | UserError] = []
        with _one_at_a_time:
            lines = _ask(self._templates, self._values, asked)
        for line in lines:
            found.append(self._error(*line["problem"]) if "problem" in line else Rendered(**line))
        return found + found[-1:] * (len(asked) - len(found))

    def _error(self, kind: str, what: str) -> UserError:
        what = " ".join(what.split())
        if kind == "syntax":
            return UserError(f"{self._source}: chat template, {what}; expected a Jinja template")
        if kind == "rejected":
            return UserError(f"{self._source}: the chat template rejects the conversation: {what}")
        return UserError(
            f"{self._source}: the chat template fails: {what}; expected one that needs less than "
            f"{SECONDS} s, {MEGABYTES} MiB and {CHARACTERS:,} characters for a conversation"
        )


_process: subprocess.Popen[bytes] | None = None
_owner = 0  # the process that started it; a fork of that one starts its own
_one_at_a_time = threading.Lock()  # a server tokenizes in several threads


def _ask(
    templates: Sequence[str], values: Mapping[str, str], asked: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The answers of `template_process.answer`, up to the one that ended the process."""
    process = _running()
    assert process.stdin is not None and process.stdout is not None
    request = {"templates": templates, "values": values, "conversations": asked}
    lines: list[bytes] = []
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        while len(lines) < len(asked) and (line := process.stdout.readline()).endswith(b"\n"):
            lines.append(line)
    except BrokenPipeError:
        pass
    found = [dict(json.loads(line)) for line in lines]
    if len(found) == len(asked):
        return found
    problem = {"problem": ["failed", _why_it_ended()]}
    if len(asked) == 1:
        return [problem]
    # Answers that the process had not sent yet are lost: each of the rest is asked alone.
    for one in asked[len(found) :]:
        found += _ask(templates, values, [one])
        if _process is None:  # that was the one
            break
    return found


def _running() -> subprocess.Popen[bytes]:
    """The process of this process, started if there is none."""
    global _process, _owner
    if _process is None or _owner != os.getpid():
        # -P: modules beside the program are not importable by their short names.
        command = [sys.executable, "-P", str(_PROGRAM)]
        _process = subprocess.Popen(
            [*command, str(SECONDS), str(MEGABYTES), str(CHARACTERS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _owner = os.getpid()
    return _process


def _why_it_ended() -> str:
    """Forgets the process, which has ended, and says why it did."""
    global _process
    assert _process is not None and _process.stdout is not None
    _process.stdout.close()
    status, _process = _process.wait(), None
    ends = {-signal.SIGPROF: f"more than {SECONDS} s of processor time"}
    return ends.get(status, f"its process ended with status {status}")
