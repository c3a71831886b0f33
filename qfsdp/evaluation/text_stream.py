"""Text from generated tokens, one token at a time."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Turns tokens into text as they arrive, in whole characters.

    A character may take several tokens, and the text of a token may depend on the token before it.
    So each new piece is decoded together with the previous piece, whose text is then removed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # start of the previous piece
        self._done = 0  # number of tokens whose text has been returned

    def push(self, token: int) -> str:
        """The text that this token completes. May be empty."""
        self._ids.append(token)
        text = self._rest()
        if text.endswith("\ufffd"):  # part of a character
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text

    def end(self) -> str:
        """The remaining text: an incomplete character."""
        return self._rest()

    def _rest(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]
