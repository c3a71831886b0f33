"""Which characters of a rendered conversation are trained.

A chat template is a program and can write anything. But if the rendered first k messages are the
beginning of the whole text, message k ends where they end. So the whole conversation is rendered
once and tokenized once, which gives the ids that inference sees. The borders of messages are then
looked up by character:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |--- messages[:1] rendered with the generation prompt -|-- trained -|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError
from qfsdp.data.chat_template import Request
from qfsdp.data.messages import function_name


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template, and which of them are trained.

    Fields:
        messages: as the template reads them.
        trained: indices of the messages that are trained.
        tools: the functions that the assistant may call, or None.
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
        """A conversation whose trained messages are those with `masked` false; those of dicts
        without `masked` are the assistant's."""
        trained = [index for index, message in enumerate(messages) if not _is_masked(message)]
        plain = [plain_message(message) for message in messages]
        return cls(plain, trained, tools, add_generation_prompt)

    def request(self) -> Request:
        """What the template has to render: the whole text, then the beginnings at `_borders`."""
        whole = (len(self.messages), self.add_generation_prompt)
        parts = [(at + 1, self.messages[at + 1]["role"] == "assistant") for at in self._borders()]
        return Request(self.messages, [whole, *parts], self.tools)

    def _borders(self) -> list[int]:
        """The messages whose ends are looked up; with the header of an answer that follows."""
        last = len(self.messages) - 1
        return sorted({at for i in self.trained for at in (i - 1, i) if 0 <= at < last})

    def spans(
        self, texts: Sequence[str], special_tokens: Mapping[str, int], source: Path
    ) -> list[tuple[int, int]]:
        """The character ranges of the whole text that are trained, one for each trained message.

        White space after a special token that ends a message is not trained.

        Args:
            texts: as `ChatTemplate` rendered `request`.
            source: the model folder, for messages.

        Raises:
            UserError: the template rewrites earlier turns.
        """
        whole, *beginnings = texts
        ends = {-1: 0, len(self.messages) - 1: len(whole)}
        for at, beginning in zip(self._borders(), beginnings, strict=True):
            if not whole.startswith(beginning):
                raise UserError(
                    f"{source}: the chat template rewrites earlier turns, so message "
                    f"{at + 1} of {len(self.messages)} cannot be found; expected training on the "
                    "last turn only, or another tokenizer.chat_template"
                )
            ends[at] = len(beginning)
        spans = []
        for index in self.trained:
            start, stop = ends[index - 1], ends[index]
            ended = whole[:stop].rstrip()
            if ended.endswith(tuple(special_tokens)):
                stop = max(start, len(ended))
            spans.append((start, stop))
        return spans

    def left_out(self, whole: str, spans: Sequence[tuple[int, int]]) -> str | None:
        """What the template does not write: "tool calls (NAME)" or "tools (NAME)"; or None.

        Args:
            whole: the rendered conversation.
            spans: of the trained messages.
        """
        texts = {i: whole[start:stop] for i, (start, stop) in zip(self.trained, spans, strict=True)}
        for index, message in enumerate(self.messages):
            for call in message.get("tool_calls") or ():
                name = function_name(call)
                if name and name not in texts.get(index, whole):
                    return f"tool calls ({name})"
        names = filter(None, map(function_name, self.tools or ()))
        return next((f"tools ({name})" for name in names if name not in whole), None)


@dataclass(frozen=True)
class TokenizedChat:
    """A conversation as tokens.

    Fields:
        tokens: cut to `max_seq_len`.
        mask: of equal length; True where a token is not trained (torchtune's convention).
        spelled: the first special token that a message spells and what became of it, or None.
    """

    tokens: list[int]
    mask: list[bool]
    spelled: str | None = None


def plain_message(message: Any) -> dict[str, Any]:
    """A torchtune `Message` or a dict as a dict for the template, with text content.

    The content of a message with tool calls may be None.

    Raises:
        UserError: there is no role, or no text.
    """
    if isinstance(message, Mapping):
        plain = {key: value for key, value in message.items() if key != "masked"}
    else:
        content = None if message.contains_media else message.text_content
        plain = {"role": message.role, "content": content}
    role, content = plain.get("role"), plain.get("content")
    no_text = content is None and plain.get("tool_calls")
    if not isinstance(role, str) or not (no_text or isinstance(content, str)):
        raise UserError(f"message {str(message)[:100]!r}; expected a role and text content")
    # torchtune calls the result of a tool call "ipython", chat templates call it "tool".
    return plain | {"role": "tool" if role == "ipython" else role}


def _is_masked(message: Any) -> bool:
    if isinstance(message, Mapping):
        return bool(message.get("masked", message.get("role") != "assistant"))
    return bool(message.masked)
