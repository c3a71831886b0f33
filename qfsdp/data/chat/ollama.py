"""A Modelfile for Ollama, whose templates are Go's and not Jinja's.

Formats: https://docs.ollama.com/modelfile and https://docs.ollama.com/template. Without a TEMPLATE
Ollama takes one of its own if it knows the chat template of the GGUF file, and else none.

The Go template is made of what the chat template writes around the messages of three
conversations. It is kept only if it writes other conversations as the chat template does. So the
Modelfile of some models has no TEMPLATE: those whose chat template puts the system message into the
last question, or changes earlier turns. Functions that the model may call are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

from qfsdp.common.errors import UserError

if TYPE_CHECKING:
    from qfsdp.data.tokenizer import HFTokenizer

Turn = tuple[str, str]  # role and content
SYSTEM, USER, ANSWER, AGAIN = "qfsdpsystem", "qfsdpuser", "qfsdpanswer", "qfsdpagain"
# Conversations that decide whether a template is taken.
CHECKED: list[list[Turn]] = [
    [("user", "a")],
    [("system", "b"), ("user", "c")],
    [("user", "d"), ("assistant", "e"), ("user", "f")],
    [("system", "g"), ("user", "h"), ("assistant", "i"), ("user", "j"), ("assistant", "k")]
    + [("user", "l")],
]


@dataclass(frozen=True)
class GoTemplate:
    """What stands before and after the content of each role's messages, and at both ends.

    Fields:
        around: role -> the two texts.
        start: of every conversation.
        header: of the answer.
        system: the message where a conversation has none, or None.
    """

    around: dict[str, Turn]
    start: str
    header: str
    system: str | None = None

    def render(self, turns: list[Turn]) -> str:
        """A conversation as Ollama writes it."""
        if self.system is not None and turns[0][0] != "system":
            turns = [("system", self.system), *turns]
        written = "".join(text.join(self.around[role]) for role, text in turns)
        return self.start + written + self.header

    def text(self) -> str:
        """The template in Go's language."""
        cases = [
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ '
            for role, (before, after) in self.around.items()
        ]
        turns = f"{{{{ {'else '.join(cases)}end }}}}"
        return f"{self.start}{{{{ range .Messages }}}}{turns}{{{{ end }}}}{self.header}"


def go_template(tokenizer: HFTokenizer, adds_bos: bool) -> GoTemplate | None:
    """The tokenizer's chat template as a Go template; None if it cannot be one.

    Args:
        adds_bos: llama.cpp puts the first token before every text.
    """
    bos = "" if tokenizer.bos_id is None else tokenizer.decode([tokenizer.bos_id], False)

    def render(turns: list[Turn]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.render(messages, add_generation_prompt=True)
        return text.removeprefix(bos) if adds_bos else text

    try:
        asked = render([("user", USER)])
    except UserError:
        return None
    with_system = _rendered(render, [("system", SYSTEM), ("user", USER)])
    talk = [("user", USER), ("assistant", ANSWER), ("user", AGAIN)]
    answered = _rendered(render, talk)
    common = os.path.commonprefix([asked, with_system or bos])
    for start in ("", bos, common):
        found = _found(start, asked, answered, with_system) if asked.startswith(start) else None
        if found is not None and _is_right(found, render):
            return found
    return None


def _rendered(render: Callable[[list[Turn]], str], turns: list[Turn]) -> str | None:
    try:
        return render(turns)
    except UserError:
        return None


def _is_right(found: GoTemplate, render: Callable[[list[Turn]], str]) -> bool:
    """Whether it writes conversations as the chat template does, and can stand in a Modelfile."""
    checked = CHECKED if "system" in found.around else CHECKED[::2]
    ends = (found.start, found.header, found.system or "")
    parts = [*ends, *(text for pair in found.around.values() for text in pair)]
    return not any('"""' in part or "{{" in part for part in parts) and all(
        _rendered(render, turns) == found.render(turns) for turns in checked
    )


def _found(
    start: str, asked: str, answered: str | None, with_system: str | None
) -> GoTemplate | None:
    """The template that three rendered conversations suggest, if all of them begin with `start`.

    Args:
        asked, answered, with_system: a question; with its answer and a second question; with a
            system message before it. None: the chat template refuses the conversation.
    """
    try:
        before, header = _split(asked.removeprefix(start), USER)
        between, after = _split(_split(answered or "", USER)[1], ANSWER)
        between_turns, _ = _split(after, AGAIN)
        opening, middle = None, before
        if with_system is not None:
            opening, rest = _split(with_system.removeprefix(start), SYSTEM)
            middle, _ = _split(rest, USER)
    except ValueError:
        return None
    begins = _common_end(_common_end(before, between_turns), middle)
    closing, default = middle.removesuffix(begins), before.removesuffix(begins)
    ends = between_turns.removesuffix(begins)
    shared = ends if between.startswith(ends) and header.startswith(ends) else ""  # of questions
    around = {"user": (begins, shared), "assistant": (between.removeprefix(shared), ends)}
    header = header.removeprefix(shared)
    if opening is None:
        return None if default else GoTemplate(around, start, header)
    around = {"system": (opening, closing)} | around
    if not default:
        return GoTemplate(around, start, header)
    if not (default.startswith(opening) and default.endswith(closing)):
        return None  # what stands before the first question is no system message
    system = default[len(opening) : len(default) - len(closing)]
    return GoTemplate(around, start, header, system)


def _split(text: str, mark: str) -> Turn:
    before, found, after = text.partition(mark)
    if not found:
        raise ValueError("a message is changed, or missing")
    return before, after


def _common_end(a: str, b: str) -> str:
    return os.path.commonprefix([a[::-1], b[::-1]])[::-1]


def modelfile(file: str, tokenizer: HFTokenizer | None, adds_bos: bool, stops: set[int]) -> str:
    """The text of a Modelfile.

    Args:
        file: name of the GGUF file, in the same folder.
        tokenizer: with the chat template that the model was trained with, or None.
        adds_bos: as in `go_template`.
        stops: tokens that end an answer.
    """
    name = re.sub("[^a-z0-9_-]+", "-", file.partition(".")[0].lower())  # what Ollama takes
    given = quote(f"{file.removesuffix('.gguf')}.Modelfile")
    lines = [f"# ollama create {name} -f {given}", f"FROM ./{file}"]
    found = None if tokenizer is None else go_template(tokenizer, adds_bos)
    if found is None:
        lines.append(
            "# The chat template cannot be written in Ollama's language; it takes its own."
        )
    else:
        lines.append(f'TEMPLATE """{found.text()}"""')
        if found.system is not None:
            lines.append(f'SYSTEM """{found.system}"""')
    if tokenizer is not None:
        ends = [tokenizer.decode([stop], skip_special_tokens=False) for stop in sorted(stops)]
        lines += [f'PARAMETER stop "{end}"' for end in ends if end and '"' not in end]
    return "\n".join(lines) + "\n"
