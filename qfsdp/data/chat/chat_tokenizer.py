"""Conversations to token ids by a chat template: rendered, made safe, tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.chat_template import ChatTemplate, Conversation, Range, Rendered
from qfsdp.data.chat.special_tokens import SpecialTokens
from qfsdp.data.chat.trained_spans import AnswerForm, TokenizedChat, TrainedSpans, left_out, place
from qfsdp.data.encode import TooSlow
from qfsdp.data.tokenizer_folder import eos_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def spelled_as(token: str, plain: bool) -> str:
    """What a user must know of a special token that a text spells."""
    became = "plain text" if plain else "a special token"
    return f"{token!r}, encoded as {became} (tokenizer.special_tokens_in_text)"


def raised(found: Any) -> Any:
    """The result, unless it is an error: that is raised."""
    if isinstance(found, UserError):
        raise found
    return found


@dataclass(frozen=True)
class ChatTokenizer:
    """Tokenizes conversations.

    Fields:
        backend: the tokenizer.
        special: its special tokens.
        template: writes conversations.
        source: the model folder, for messages.
        keep_special: special tokens that a message spells are special.
        bos: the token that begins a text, or None.
        eos_id: the token that ends a text.
    """

    backend: Tokenizer
    special: SpecialTokens
    template: ChatTemplate
    source: Path
    keep_special: bool
    bos: str | None
    eos_id: int

    @cached_property
    def form(self) -> AnswerForm:
        """What the template writes around answers."""
        return AnswerForm.of(self.template, self.special.ids, self.bos)

    @cached_property
    def stops(self) -> list[str]:
        """The special tokens at which generation stops."""
        ids = {self.eos_id, *eos_ids(self.source)}
        stops = [text for text, index in self.special.ids.items() if index in ids]
        return [*stops, *filter(None, (self.form.end, self.form.end_of_call))]

    def tokenize(self, asked: Sequence[Conversation]) -> list[TokenizedChat | UserError]:
        """Tokens of each conversation, not cut; or an error, which all have after one that took too
        long."""
        safe = list(map(self._made_safe, asked))
        rendered = self.template.render([conversation for conversation, _, _ in safe])
        results: list[TokenizedChat | UserError] = []
        for (conversation, hidden, note), found in zip(safe, rendered, strict=True):
            try:
                text, spans, remark = self._spans(conversation, found)
                ids, trained = self.special.encode_chat(text, hidden, spans)
            except TooSlow as error:  # others may be as slow
                return results + [error] * (len(safe) - len(results))
            except UserError as error:
                results.append(error)
            else:
                results.append(TokenizedChat(ids, [not flag for flag in trained], note, remark))
        return results

    def _made_safe(
        self, conversation: Conversation
    ) -> tuple[Conversation, Mapping[str, str], str | None]:
        """A conversation for the template, what `SpecialTokens.hide` has hidden in it, and what a
        user must know of that."""
        messages, tools = conversation.messages, conversation.tools
        if any(m["role"] == "developer" for m in messages) and not self.form.knows_developer:
            messages = [
                {**m, "role": "system"} if m["role"] == "developer" else m for m in messages
            ]
        hidden: Mapping[str, str] = {}
        token = self.special.first_inside([messages, tools])
        if token is not None and not self.keep_special:
            (messages, tools), hidden = self.special.hide([messages, tools])
        note = token and spelled_as(token, plain=not self.keep_special)
        return replace(conversation, messages=messages, tools=tools), hidden, note

    def _spans(
        self, conversation: Conversation, found: Rendered | UserError
    ) -> tuple[str, list[Range], str | None]:
        """A rendered conversation, its trained ranges and what a user must know; raises UserError.

        Where an answer ends with the first token of the next turn (GLM), the text gets one.
        """
        messages = conversation.messages
        if isinstance(found, UserError):
            # A template without tools may fail because the content of a call is None.
            calls = [i for i, message in enumerate(messages) if message.get("tool_calls")]
            if calls and not self.template.reads("tool_calls"):
                raise left_out(self.source, f"tool calls of {place(messages, calls[0])}")
            raise found
        last = len(messages) - 1
        answered = last in conversation.trained and conversation.is_answer(last)
        if answered and self.form.of_next_turn:
            ends = self.form.end_of_call if messages[last].get("tool_calls") else self.form.end
            found.text += ends or ""
        if conversation.add_generation_prompt:
            found.text += self.form.unasked
        spans = TrainedSpans(self, conversation, found)
        spans.check_whole()
        return found.text, *spans.find()
