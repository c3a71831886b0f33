"""Renders chat templates in a process of its own, which `qfsdp.data.chat_template` starts.

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
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# `qfsdp.cli.signals.SIGNALS`, without SIG
STOPS = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "XCPU", "ALRM", "PWR")


class Generation(Extension):
    """`{% generation %}` marks answers for other trainers. Here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """What templates call to reject a conversation."""
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The date, which some templates write into the system message."""
    return datetime.now().strftime(pattern)


def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as it is. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=4)
def compiled(source: str) -> Template:
    """The template, with the functions that Hugging Face templates may call."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def rendered(
    template: Template,
    values: dict[str, Any],
    conversation: dict[str, Any],
    messages: list[dict[str, Any]],
) -> list[str]:
    """The text of each part of a conversation; see `answer`."""
    return [
        template.render(
            messages=messages[:count],
            tools=conversation["tools"],
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **values,
        )
        for count, add_generation_prompt in conversation["parts"]
    ]


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of tool calls as JSON text. Most templates want objects."""
    changed: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in changed:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            function["arguments"] = tojson(function.get("arguments", {}))
    return changed


def answer(
    source: str, values: dict[str, Any], conversation: dict[str, Any], characters: int
) -> dict[str, Any]:
    """Renders beginnings of one conversation.

    Args:
        source: the template.
        values: more variables of the template.
        conversation: "messages", "tools", and "parts", a list of
            `[number of messages, add_generation_prompt]`, each of which is rendered.
        characters: the most that a text may have.

    Returns:
        "texts", one for each part. Or "problem": its kind ("syntax", "rejected" or "failed") and
        what is wrong.
    """
    try:
        template, messages = compiled(source), conversation["messages"]
        try:
            texts = rendered(template, values, conversation, messages)
        except TypeError:  # perhaps the template puts arguments together with text
            texts = rendered(template, values, conversation, with_text_arguments(messages))
        longest = max(map(len, texts), default=0)
        if longest > characters:
            return {"problem": ["failed", f"{longest} characters for one conversation"]}
        return {"texts": texts}
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
