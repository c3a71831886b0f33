"""Conversations to token ids by a chat template: rendered, made safe, tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.cli.errors import UserError
from qfsdp.data.chat_template import ChatTemplate
from qfsdp.data.special_tokens import SpecialTokens
from qfsdp.data.trained_spans import Conversation, TokenizedChat

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
    """

    backend: Tokenizer
    special: SpecialTokens
    template: ChatTemplate
    source: Path
    keep_special: bool

    def tokenize(self, asked: Sequence[Conversation]) -> list[TokenizedChat | UserError]:
        """Tokens of each conversation, not cut; or an error."""
        hidden: list[Mapping[str, str]] = []
        notes: list[str | None] = []
        safe = []
        for conversation in asked:
            data = [conversation.messages, conversation.tools]
            token = self.special.first_inside(data)
            names: Mapping[str, str] = {}
            if token is not None and not self.keep_special:
                (messages, tools), names = self.special.hide(data)
                conversation = replace(conversation, messages=messages, tools=tools)
            safe.append(conversation)
            hidden.append(names)
            notes.append(token and spelled_as(token, plain=not self.keep_special))
        rendered = self.template.render([conversation.request() for conversation in safe])
        results: list[TokenizedChat | UserError] = []
        for conversation, texts, names, note in zip(safe, rendered, hidden, notes, strict=True):
            try:
                spans = self._spans(conversation, texts)
            except UserError as error:
                results.append(error)
            else:
                ids, trained = self._encode(raised(texts)[0], spans, names)
                results.append(TokenizedChat(ids, [not flag for flag in trained], note))
        return results

    def _spans(
        self, conversation: Conversation, texts: list[str] | UserError
    ) -> list[tuple[int, int]]:
        """The trained ranges of a rendered conversation; raises UserError."""
        left_out, spans = None, []
        if not isinstance(texts, UserError):
            spans = conversation.spans(texts, self.special.ids, self.source)
            left_out = conversation.left_out(texts[0], spans)
        elif any(message.get("tool_calls") for message in conversation.messages):
            # A template without tools may fail because the content of a call is None.
            left_out = None if self.template.reads("tool_calls") else "tool calls"
        if left_out is not None:
            raise UserError(
                f"{self.source}: the chat template leaves out {left_out}; expected a template "
                "that writes them, such as tokenizer.chat_template=chatml"
            )
        raised(texts)
        return spans

    def _encode(
        self, text: str, spans: Sequence[tuple[int, int]], hidden: Mapping[str, str]
    ) -> tuple[list[int], list[bool]]:
        """Ids of a rendered conversation, and for each of them whether it lies in a span."""
        # One extra slot, never trained: an empty token at offset 0 reads index -1.
        flags = bytearray(len(text) + 1)
        for start, stop in spans:
            flags[start:stop] = b"\1" * (stop - start)
        if hidden:
            return self.special.encode_hidden(text, hidden, flags)
        encoding = self.backend.encode(text, add_special_tokens=False)
        # The last character decides: byte-level tokenizers may leave the leading space out of a
        # token's offsets.
        return encoding.ids, [bool(flags[stop - 1]) for _, stop in encoding.offsets]
