"""Text from generated tokens, one token at a time."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Text of tokens as they come, in whole characters.

    A character may be several tokens long, and how a token is written may depend on the one before
    it, so every piece is the difference of two texts that begin with the piece before.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # of the piece before
        self._told = 0  # tokens whose text has been given out

    def push(self, token: int) -> str:
        """The text that is complete with this token."""
        self._ids.append(token)
        text = self._rest()
        if text.endswith("\ufffd"):  # a part of a character
            return ""
        self._start, self._told = self._told, len(self._ids)
        return text

    def end(self) -> str:
        """What is left: a character that was never completed."""
        return self._rest()

    def _rest(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._told])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]
