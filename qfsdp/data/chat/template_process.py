"""Renders chat templates in a process of its own, which `qfsdp.data.chat.chat_template` starts.

A chat template is a program that came with a model folder. Jinja's sandbox keeps it from files and
from Python's internals, but not from taking all time and memory: `{{ 'x' * 10**10 }}`. So this
process has limits that the operating system enforces, whatever the template does:

    SECONDS      of processor time per conversation; then the kernel ends the process (SIGPROF)
    MEGABYTES    of address space; more is a MemoryError
    CHARACTERS   of a rendered conversation

    python template_process.py SECONDS MEGABYTES CHARACTERS

Reads requests from standard input, one JSON object per line, and ends with the input. A request has
two templates, without and with tools, and several conversations: waking a process up for each of
them would take a fifth of the time of tokenizing. The answer to each conversation is one line of
JSON on standard output. The process imports jinja2 and nothing of qfsdp, so it needs 21 MB.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# `qfsdp.launch.signals.SIGNALS`, without SIG
STOPS = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "XCPU", "ALRM", "PWR")
PRIVATE = range(0x100000, 0x10FFFD)  # characters without a meaning (plane 16 of Unicode)


class Turns:
    """Writes into a text where its messages are, as marks that `take_marks` takes out again.

    A mark is a letter and a number between two characters that the conversation does not have:

        at     a loop has come to the message of this number; -1: after the loop
        from   the content of the message begins; to: it ends
        train  what is trained begins; done: it ends, as the template says itself

    Args:
        messages: of the conversation.
        conversation: all that the template sees, as text.
    """

    def __init__(self, messages: Sequence[Any], conversation: str) -> None:
        unused = (character for character in map(chr, PRIVATE) if character not in conversation)
        self._edge = next(unused)
        self._loops: list[int] = []
        self.messages = [
            self._framed(index, message) if isinstance(message.get("content"), str) else message
            for index, message in enumerate(messages)
        ]
        self._numbers: dict[int, int] = {}

    def follow(self, messages: Sequence[Any]) -> None:
        """Says which messages a template gets: these, or those with marks."""
        self._loops = []
        self._numbers = {id(message): index for index, message in enumerate(messages)}

    def _framed(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """The message with marks around its content, within the white space that templates trim.

        A template may cut a content at its <think>, and with it a mark.
        """
        content = message["content"]
        inner = content.strip()
        if not inner or "think>" in inner:
            return message
        marked = self.mark("from", index) + inner + self.mark("to", index)
        return message | {"content": content.replace(inner, marked, 1)}

    def mark(self, kind: str, number: int = 0) -> str:
        """The mark of a kind."""
        return f"{self._edge}{kind} {number}{self._edge}"

    def enter(self) -> str:
        """Called before a loop."""
        self._loops.append(-1)
        return ""

    def item(self, value: Any) -> str:
        """Called at the start of each round of a loop."""
        left, self._loops[-1] = self._loops[-1], -1
        return self.assigned(value) or self._back(left)

    def assigned(self, value: Any) -> str:
        """Called after `set name = list[index]`, for loops over indices of messages."""
        number = self._numbers.get(id(value), -1)
        if number < 0 or not self._loops or self._loops[-1] >= 0:
            return ""
        self._loops[-1] = number
        return self.mark("at", number)

    def leave(self) -> str:
        """Called after a loop."""
        return self._back(self._loops.pop())

    def _back(self, left: int) -> str:
        """After a message: what follows belongs to that of an outer loop, or to none."""
        outer = [number for number in self._loops if number >= 0]
        return "" if left < 0 else self.mark("at", outer[-1] if outer else -1)

    def take_marks(self, text: str) -> tuple[str, list[tuple[int, str, int]]]:
        """The text without marks; and the place, kind and number of each."""
        parts = re.split(f"{self._edge}([a-z]+) (-?[0-9]+){self._edge}", text)
        marks, at = [], 0
        for part, kind, number in zip(parts[::3], parts[1::3], parts[2::3], strict=False):
            at += len(part)
            marks.append((at, kind, int(number)))
        return "".join(parts[::3]), marks


class Generation(Extension):
    """`{% generation %}` marks what is trained."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if not isinstance(self.environment, Marking):
            return body
        start, end = (_call("mark", nodes.Const(kind), line=line) for kind in ("train", "done"))
        return [start, *body, end]


def _call(name: str, *arguments: Any, line: int) -> nodes.Output:
    """A statement that writes what a method of `turns` returns."""
    method = nodes.Getattr(nodes.Name("qfsdp_turns", "load"), name, "load")
    output = nodes.Output([nodes.Call(method, list(arguments), [], None, None)])
    output.set_lineno(line, override=True)
    return output


class Marking(ImmutableSandboxedEnvironment):
    """Templates that call the methods of `qfsdp_turns` in all their loops."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in [tree, *tree.find_all(nodes.Node)]:
            for body in (value for _, value in node.iter_fields() if isinstance(value, list)):
                body[:] = [new for item in body for new in self._marked(item)]
        return tree

    def _marked(self, node: Any) -> list[Any]:
        """A statement between those that mark it."""
        target: Any = getattr(node, "target", None)
        name = nodes.Name(target.name, "load") if isinstance(target, nodes.Name) else None
        if isinstance(node, nodes.Assign) and isinstance(node.node, nodes.Getitem) and name:
            return [node, _call("assigned", name, line=node.lineno)]
        if not isinstance(node, nodes.For):
            return [node]
        node.body.insert(0, _call("item", name or nodes.Const(None), line=node.lineno))
        return [_call("enter", line=node.lineno), node, _call("leave", line=node.lineno)]


def raise_exception(message: str) -> NoReturn:
    """What templates call to reject a conversation."""
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The date, which some templates write into the system message."""
    return datetime.now().strftime(pattern)


def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as it is. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=8)
def compiled(source: str, marking: bool) -> Template:
    """The template, with the functions that Hugging Face templates may call."""
    kind = Marking if marking else ImmutableSandboxedEnvironment
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def rendered(
    source: str, values: dict[str, Any], conversation: dict[str, Any], messages: list[Any]
) -> dict[str, Any]:
    """The text and marks of a conversation; see `answer`.

    It is rendered twice, since marks may change what a template does: then there are none.
    """
    values = values | {
        "tools": conversation["tools"],
        "documents": None,
        "add_generation_prompt": conversation["add_generation_prompt"],
    }
    text = compiled(source, False).render(values, messages=messages)
    turns = Turns(messages, json.dumps([conversation, source], ensure_ascii=False))
    for framed in (turns.messages, messages):
        turns.follow(framed)
        with suppress(Exception):  # of a template that cannot read a marked content
            marked = compiled(source, True).render(values, messages=framed, qfsdp_turns=turns)
            same, marks = turns.take_marks(marked)
            if same == text:
                return {"text": text, "marks": marks, "framed": framed is turns.messages}
    return {"text": text, "marks": [], "framed": False}


def forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages in the forms that a template may want, the first as transformers hands it on.

    The content of a message that is a call alone is missing, None or "": GLM's template writes the
    word None for None, gpt-oss's and LFM2's fail on it, DeepSeek's needs it. Of each the arguments
    of calls as objects, which most templates want, then as JSON text.
    """
    bare = [{key: value for key, value in m.items() if value is not None} for m in messages]
    without = [message for message in bare if "content" not in message]
    calls = any("tool_calls" in message for message in bare)
    for content in ({}, {"content": None}, {"content": ""}) if without else ({},):
        given: list[dict[str, Any]] = [content | message for message in bare]
        yield given
        if calls:  # made only where the first form fails
            yield _with_text_arguments(given)


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    changed: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in changed:
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            function["arguments"] = tojson(function.get("arguments", {}))
    return changed


def answer(
    source: str, values: dict[str, Any], conversation: dict[str, Any], characters: int
) -> dict[str, Any]:
    """Renders one conversation.

    Args:
        source: the template.
        values: more variables of the template.
        conversation: "messages", "tools" and "add_generation_prompt". No messages: the template is
            only compiled.
        characters: the most that a text may have.

    Returns:
        "text"; "marks", the place, kind and number of each mark of `Turns`; "framed", whether
        contents have marks. Or "problem": its kind ("syntax", "rejected" or "failed") and what is
        wrong.
    """
    try:
        messages = conversation["messages"]
        if messages is None:
            compiled(source, False)
            return {"text": ""}
        problem: Exception | None = None
        for form in forms(messages):
            try:
                found = rendered(source, values, conversation, form)
                break
            except (TypeError, UndefinedError) as error:  # as of None + text; another form may do
                problem = problem or error
        else:
            assert problem is not None
            raise problem
        if len(found["text"]) > characters:
            return {"problem": ["failed", f"{len(found['text'])} characters for one conversation"]}
        return found
    except TemplateSyntaxError as error:
        return {"problem": ["syntax", f"line {error.lineno}: {error.message}"]}
    except TemplateError as error:
        return {"problem": ["rejected", str(error)]}
    except MemoryError:
        return {"problem": ["failed", "out of memory"]}
    except Exception as error:  # whatever the template calls may raise anything
        return {"problem": ["failed", f"{type(error).__name__}: {str(error)[:1000]}"]}


def main() -> None:
    """Answers requests until the input ends. Signals that end the run do not end it before."""
    for name in STOPS:
        if (number := getattr(signal, f"SIG{name}", None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    seconds, megabytes, characters = map(int, sys.argv[1:])
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for conversation in request["conversations"]:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            template = request["templates"][conversation["tools"] is not None]
            found = answer(template, request["values"], conversation, characters)
            sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
