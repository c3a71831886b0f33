"""Which characters of a rendered conversation are trained.

The whole conversation is rendered once and tokenized once, which gives the ids that inference sees.
The template process says what the template wrote while it was at which message (`Rendered.turns`).
The header, which the template also writes before an answer that a model is to give, is not trained:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |------------ turns[0] ----------|------------- turns[1] -------------|
                                     |--- form.headers[0] --|-- trained --|
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.chat_template import REASONING, ChatTemplate, Conversation, Range, Rendered
from qfsdp.data.chat.messages import function_name

if TYPE_CHECKING:
    from qfsdp.data.chat.chat_tokenizer import ChatTokenizer

TRAINED_AS = 7  # goes up when other tokens are trained: cached ones are then made again
BEFORE_THINK = "the text before </think>"


@dataclass(frozen=True)
class TrainedSpans:
    """Finds what is trained in a rendered conversation.

    Fields:
        chats: what is known of the template, and of the tokens with which a turn may end.
        conversation: the conversation.
        rendered: its text.
    """

    chats: ChatTokenizer
    conversation: Conversation
    rendered: Rendered

    def find(self) -> tuple[list[Range], str | None]:
        """The trained ranges of the text, and what a user must know of them or None.

        White space after a special token that ends a message is not trained. Where the template
        marks what is trained, no more than that is. Raises UserError: a trained message cannot be
        found in the text."""
        spans: list[Range] = []
        remark = None
        for index in self.conversation.trained:
            if not self.conversation.is_answer(index):
                spans.append(self._up_to_the_next(index))
                continue
            parts, header = self._parts(index)
            marks = [(max(a, c), min(b, d)) for a, b in parts for c, d in self.rendered.marked]
            found = [(a, b) for a, b in marks if a < b] or parts
            if self.chats.form.of_next_turn:
                found[-1] = (found[-1][0], parts[-1][1])
            spans += found
            if remark is None and not self.rendered.text.endswith(
                tuple(self.chats.stops), *found[-1]
            ):
                remark = self._never_ends(index, found[-1])
            if remark is None and header not in ("", self.chats.form.headers[0]):
                remark = self._differs(header)
        return spans, remark

    def _turn(self, index: int) -> list[Range]:
        """What the template wrote of a message; of one without loops over messages its content."""
        content = self.rendered.contents.get(index)
        found = self.rendered.turns.get(index) or ([content] if content else [])
        if not found:
            raise UserError(
                f"{self.chats.source}: message {index + 1} of {len(self.conversation.messages)} "
                "cannot be found in what the chat template writes; expected a template with a loop "
                "over messages, such as tokenizer.chat_template=chatml"
            )
        return found

    def _parts(self, index: int) -> tuple[list[Range], str]:
        """The parts of an answer, and the header that stands before it."""
        (_, stop), *others = self._turn(index)
        start, header = self._start(index)
        parts = [(start, stop), *(p for p in others if self.rendered.text[slice(*p)].strip())]
        parts[-1] = (parts[-1][0], self._stop(*parts[-1]))
        return parts, header

    def _start(self, index: int) -> tuple[int, str]:
        """Where an answer begins, and the header that stands before it."""
        start, stop = self._turn(index)[0]
        until = min(stop, self.rendered.contents.get(index, (stop, stop))[0])
        for header in self.chats.form.headers:
            at = self.rendered.text.find(header, start, until)
            if at >= 0:
                return at + len(header), header
        return start, ""

    def _stop(self, start: int, stop: int) -> int:
        """Where a message ends that stands between two characters: with the token that ends it."""
        text = self.rendered.text
        ended = start + len(text[start:stop].rstrip())
        if text.endswith(tuple(self.chats.special.ids), start, ended):
            return ended
        after = re.compile(r"\s*").match(text, stop)
        at = stop if after is None else after.end()
        following = [token for token in self.chats.stops if text.startswith(token, at)]
        return at + len(max(following, key=len)) if following else stop

    def _up_to_the_next(self, index: int) -> Range:
        """A message that is no answer: all up to the next message, or to an answer's text."""
        turns, last = self.rendered.turns, len(self.conversation.messages)
        places = [at for at in range(index, last) if at in turns]
        start = turns[places[0]][0][0] if places and index else 0
        following = next((at for at in places if at > index), last)
        if self.conversation.is_answer(following):
            stop = self._start(following)[0]
        else:
            stop = turns[following][0][0] if following < last else len(self.rendered.text)
        ended = start + len(self.rendered.text[start:stop].rstrip())
        has_end = self.rendered.text.endswith(tuple(self.chats.special.ids), start, ended)
        return start, ended if has_end else stop

    def _differs(self, header: str) -> str:
        rest = self.chats.form.headers[0].removeprefix(header)
        return (
            f"{self.chats.source}: before an answer that the model is to give, the chat template "
            f"writes {rest!r}, which it does not write in conversations: answers are trained "
            "without it"
        )

    def _never_ends(self, index: int, span: Range) -> str:
        text = self.rendered.text[slice(*span)]
        token = max(filter(text.endswith, self.chats.special.ids), key=len, default=None)
        last = index == max(
            filter(self.conversation.is_answer, range(len(self.conversation.messages)))
        )
        if token is None:
            return (
                f"{self.chats.source}: the chat template ends an answer with no special token, "
                "so the model does not learn to stop; expected tokenizer.chat_template with one "
                "after answers, such as plain or chatml"
            )
        return (
            f"{self.chats.source}: the chat template ends an answer with {token!r}, at which "
            "generation does not stop; expected it among eos_token_id of generation_config.json, "
            f"{'' if last else 'dataset.train_on_last_turn_only=true, '}or another "
            "tokenizer.chat_template"
        )

    def check_whole(self) -> None:
        """Raises UserError if the template does not write a part of the conversation.

        The reasoning of an answer that is not trained may be left out by a template that knows
        reasoning: many drop that of earlier turns.
        """
        messages = self.conversation.messages
        for index, message in enumerate(messages):
            for key in ("tools", "functions"):
                held = message.get(key)
                names = filter(None, map(function_name, held if isinstance(held, list) else ()))
                if name := next((name for name in names if name not in self.rendered.text), None):
                    raise UserError(
                        f"{self.chats.source}: the chat template leaves out {key!r} ({name}) of "
                        f"{place(messages, index)}; expected them in the row's column 'tools'"
                    )
            what = next(self._missing(index, message), None)
            if what is not None:
                earlier = index < len(messages) - 1 and what in (REASONING[0], BEFORE_THINK)
                raise left_out(self.chats.source, f"{what} of {place(messages, index)}", earlier)
        for name in filter(None, map(function_name, self.conversation.tools or ())):
            if name not in self.rendered.text:
                raise left_out(self.chats.source, f"tools ({name})")

    def _missing(self, index: int, message: Mapping[str, Any]) -> Iterator[str]:
        turn = "".join(self.rendered.text[slice(*p)] for p in self.rendered.turns.get(index, ()))
        names = Counter(filter(None, map(function_name, message.get("tool_calls") or ())))
        for name, calls in names.items():  # gpt-oss's template writes the first of several
            if (turn or self.rendered.text).count(name) < calls:
                yield f"tool calls ({name})"
        earlier = message["role"] == "assistant" and index not in self.conversation.trained
        reasoning = message.get(REASONING[0])
        may_drop = earlier and any(map(self.chats.template.reads, REASONING))
        if isinstance(reasoning, str) and not (may_drop or _written(reasoning, turn)):
            yield REASONING[0]
        *thoughts, content = re.split(r"</?think>", message.get("content") or "")
        may_drop = earlier and self.chats.template.reads("think>")
        if not (may_drop or all(_written(thought, turn) for thought in thoughts)):
            yield BEFORE_THINK
        if thoughts or not self.rendered.framed:
            found = _written(content, turn) or _written(content, self.rendered.text)
        else:
            found = not content.strip() or index in self.rendered.contents
        if not found:
            yield "the content"


def place(messages: Sequence[Mapping[str, Any]], index: int) -> str:
    """How an error names a message."""
    return f"message {index + 1} of {len(messages)} ({messages[index]['role']})"


def left_out(source: Path, what: str, of_earlier_answer: bool = False) -> UserError:
    """The error for a template that leaves something out."""
    last_only = "dataset.train_on_last_turn_only=true, or " if of_earlier_answer else ""
    return UserError(
        f"{source}: the chat template leaves out {what}; expected {last_only}a template that "
        "writes it, such as tokenizer.chat_template=chatml"
    )


def _written(part: str, text: str) -> bool:
    """Whether a text has a part of a message, without white space around it, or as JSON."""
    part = part.strip()
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text


@dataclass(frozen=True)
class TokenizedChat:
    """A conversation as tokens.

    Fields:
        tokens: cut to `max_seq_len`.
        mask: of equal length; True where a token is not trained (torchtune's convention).
        spelled: the first special token that a message spells and what became of it, or None.
        remark: what a user must know of how the template writes it, or None.
    """

    tokens: list[int]
    mask: list[bool]
    spelled: str | None = None
    remark: str | None = None


_USER = {"role": "user", "content": "A question."}
_ANSWER = {"role": "assistant", "content": "An answer."}
_CALL = {
    **{"role": "assistant", "content": ""},
    "tool_calls": [{"type": "function", "function": {"name": "act", "arguments": {}}}],
}
_RESULT = {"role": "tool", "content": "A result."}
_DEVELOPER = {"role": "developer", "content": "An instruction."}
_TOKEN = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
_OPEN_TOKEN = re.compile(r"[<\[][^<>\[\]\s]*\Z")


@dataclass(frozen=True)
class AnswerForm:
    """What a chat template writes around answers, found by rendering six small conversations.

    Fields:
        headers: the header that asks the model for an answer, without white space at its start.
            Then its beginnings up to and with each token, the longest first: a <think> at its end
            is not before every answer.
        end: the special token that follows an answer, or None.
        of_next_turn: `end` is the first token of the next message. So no token follows the last
            answer (GLM).
        knows_developer: it writes messages with the role developer.
        end_of_call: likewise the first token of the results of a call, which follows a call.
        unasked: the header before an answer, if the template writes none when it is asked for a
            prompt. Prompts end with it: without it, the answer would begin with the header's text.
    """

    headers: tuple[str, ...] = ("",)
    end: str | None = None
    of_next_turn: bool = False
    knows_developer: bool = True
    end_of_call: str | None = None
    unasked: str = ""

    @classmethod
    def of(cls, template: ChatTemplate, tokens: Mapping[str, int], bos: str | None) -> AnswerForm:
        """The form of a template.

        Args:
            tokens: the special tokens.
            bos: the token that begins a text: an answer does not end with it.
        """
        asked = template.render(
            [
                Conversation([_USER]),
                Conversation([_USER], add_generation_prompt=True),
                Conversation([_USER, _ANSWER]),
                Conversation([_USER, _ANSWER, _USER]),
                Conversation([_DEVELOPER, _USER], add_generation_prompt=True),
                Conversation([_USER, _CALL, _RESULT]),
            ]
        )
        texts = [found.text if isinstance(found, Rendered) else "" for found in asked]
        question, header, answered, continued, developed, called = texts
        unasked, content, _ = answered.removeprefix(question).partition(_ANSWER["content"])
        silent = header == question and question and answered.startswith(question) and content
        # A space before the answer belongs to the answer's first token.
        unasked = unasked.rstrip(" ") if silent and unasked.strip() else ""
        header = _new_part(question, header).lstrip()
        cuts = [at for found in _TOKEN.finditer(header) for at in found.span() if at]
        headers = tuple(dict.fromkeys([header, *(header[:cut] for cut in reversed(cuts))]))
        after = (text.rpartition(_ANSWER["content"])[2].lstrip() for text in (answered, continued))
        ends = [_token_at(text, 0, tokens) for text in after]
        ends[1] = None if ends[1] == bos else ends[1]
        knows_developer = _DEVELOPER["content"] in developed
        results = asked[5].turns.get(2) if isinstance(asked[5], Rendered) else None
        of_call = _token_at(called, results[0][0], tokens) if results and ends[1] else None
        of_call = None if ends[0] else of_call
        end, of_next_turn = ends[0] or ends[1], ends[0] is None
        return cls(headers, end, of_next_turn, knows_developer, of_call, unasked)


def _new_part(before: str, after: str) -> str:
    """What `after` has in place of the end of `before`, from the start of a token."""
    shared = commonprefix([before, after])
    if len(shared) < len(before):  # <|endoftext|> and <|assistant|> share their <|
        shared = _OPEN_TOKEN.sub("", shared)
    return after[len(shared) :]


def _token_at(text: str, at: int, tokens: Mapping[str, int]) -> str | None:
    """The longest special token that begins there, or None."""
    found = (token for token in tokens if text.startswith(token, at))
    return max(found, key=len, default=None)
