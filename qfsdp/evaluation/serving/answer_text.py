"""The text of an answer as its tokens come, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qfsdp.evaluation.text_stream import TextStream


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
