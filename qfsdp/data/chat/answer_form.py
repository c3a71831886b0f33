"""What a chat template writes around answers, found by rendering four small conversations.

<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                |------ header ------|     |-- end --|
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import commonprefix

from qfsdp.data.chat.chat_template import ChatTemplate, Conversation, Rendered

_USER = {"role": "user", "content": "A question."}
_ANSWER = {"role": "assistant", "content": "An answer."}
_DEVELOPER = {"role": "developer", "content": "An instruction."}
_TOKEN = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
_OPEN_TOKEN = re.compile(r"[<\[][^<>\[\]\s]*\Z")


@dataclass(frozen=True)
class AnswerForm:
    """What a chat template writes around answers.

    Fields:
        headers: what it writes before an answer that the model is to give, without white space at
            the start; then the beginnings of it that end with a token, longest first.
        end: the special token that follows an answer, or None.
        of_next_turn: `end` begins the next message; after the last answer nothing stands (GLM).
        knows_developer: it writes messages with the role developer.
    """

    headers: tuple[str, ...] = ("",)
    end: str | None = None
    of_next_turn: bool = False
    knows_developer: bool = True

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
            ]
        )
        texts = [found.text if isinstance(found, Rendered) else "" for found in asked]
        question, header, answered, continued, developed = texts
        header = _new_part(question, header).lstrip()
        cuts = [found.end() for found in _TOKEN.finditer(header)]
        headers = tuple(dict.fromkeys([header, *(header[:cut] for cut in reversed(cuts))]))
        ends = [_token_after(text, tokens) for text in (answered, continued)]
        ends[1] = None if ends[1] == bos else ends[1]
        knows_developer = _DEVELOPER["content"] in developed
        return cls(headers, ends[0] or ends[1], ends[0] is None, knows_developer)


def _new_part(before: str, after: str) -> str:
    """What `after` has in place of the end of `before`, from the start of a token."""
    shared = commonprefix([before, after])
    if len(shared) < len(before):  # <|endoftext|> and <|assistant|> share their <|
        shared = _OPEN_TOKEN.sub("", shared)
    return after[len(shared) :]


def _token_after(text: str, tokens: Mapping[str, int]) -> str | None:
    """The longest special token that follows the answer, or None."""
    after = text.rpartition(_ANSWER["content"])[2].lstrip()
    return max(filter(after.startswith, tokens), key=len, default=None)
