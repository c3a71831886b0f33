"""Text from generated tokens, one token at a time, and up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
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
        if text:  # without text, as of a special token, it does not tell what a space before it is
            self._start = self._done
        self._done = len(self._ids)
        return text

    def end(self) -> str:
        """The remaining text: an incomplete character."""
        return self._rest()

    def _rest(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]


class AnswerText:
    """Turns tokens into text. Text that may be the beginning of a stop string is held back.

    Args:
        stops: strings that end the answer; none of them is part of its text.

    Fields:
        stopped: a stop string has come; `push` must not be called again.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._stream, self._stops, self._held = TextStream(tokenizer), stops, ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after this token. May be empty."""
        return self._released(self._stream.push(token))

    def end(self) -> str:
        """The rest of the text, when the answer has ended; empty after a stop string."""
        if self.stopped:
            return ""
        released = self._released(self._stream.end())
        return released if self.stopped else released + self._held

    def _released(self, new: str) -> str:
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` that `text` ends with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
