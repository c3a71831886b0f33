"""The one function through which text goes to a tokenizer of `tokenizers`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import SLOW_S, long_wait
from qfsdp.common.terminal import say

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

AGAIN_S = 15.0
LIMIT_S = 60.0
SLOWEST_PER_S = 50_000  # characters; 1,000,000 are usual, 600,000 in one word without a space

Place = str | Callable[[str], str]
"""Where a text stands, or a function of the text that says it."""

_place: ContextVar[Place] = ContextVar("place", default="")


class TooSlow(UserError):
    """A text was given up: its tokenizer needs too long for it."""


@contextmanager
def naming(place: Place) -> Iterator[None]:
    """Within the `with` block, the line about a slow text says where it stands."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def encode(backend: Tokenizer, text: str) -> Encoding:
    """The tokens of a text, without those that the post-processor adds.

    Nothing is checked ahead: only a text that cannot be tokenized costs more. A text that takes
    over 5 s is named on stderr. Each may take 60 s, and 1 s more per 50,000 characters.

    Raises:
        UserError: the text has half of a surrogate pair, or the tokenizer fails on it, as a regular
            expression of `tokenizer.json` does that tries too many ways (a Rust panic).
        TooSlow: a text takes longer than its limit.
    """
    try:
        return _watched(backend, text)
    except TypeError:
        half = next((at for at, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
        if half is None:
            raise
        found = f"{text[half]!r} at character {half + 1}, half of a surrogate pair"
        raise UserError(f"text: {found}; expected Unicode text") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # no public name; not an Exception
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"tokenizer.json fails on a text of {len(text)} characters: {reason}; expected a "
            "pattern that can split it, or a shorter text"
        ) from None


class _Encoder:
    """A thread that encodes one text after another. `encode` borrows one for each text: a queue
    there and back takes some 30 us, a new thread 100 us, a text of 500 characters 400 us."""

    def __init__(self) -> None:
        # `Tokenizer.encode` holds Python's lock, and no other thread would run; `encode_batch`
        # frees it. Its own threads have nothing to do for one text, and would not outlive a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.asked: SimpleQueue[tuple[Tokenizer, str]] = SimpleQueue()
        self.answers: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._work, name="encode", daemon=True).start()

    def _work(self) -> None:
        while True:
            backend, text = self.asked.get()
            try:
                self.answers.put(backend.encode_batch([text], add_special_tokens=False)[0])
            except BaseException as error:  # a panic is no Exception
                self.answers.put(error)
            del backend, text


_idle: list[_Encoder] = []
os.register_at_fork(after_in_child=_idle.clear)  # a fork has none of its parent's threads


def _watched(backend: Tokenizer, text: str) -> Encoding:
    """Encodes in a thread. Rust code cannot be interrupted: a text that is given up goes on there,
    until the process ends."""
    try:
        encoder = _idle.pop()
    except IndexError:
        encoder = _Encoder()
    encoder.asked.put((backend, text))
    try:
        found = encoder.answers.get(timeout=SLOW_S)
    except Empty:
        found = _slow(encoder.answers, text)
    _idle.append(encoder)
    if isinstance(found, BaseException):
        raise found
    return found  # type: ignore[no-any-return]


def _slow(answer: SimpleQueue[Any], text: str) -> Any:
    limit = LIMIT_S + len(text) / SLOWEST_PER_S
    about = f"a text of {len(text):,} characters that begins with {text[:20]!r}"
    place = _place.get()
    named = place if isinstance(place, str) else place(text)
    line = f"tokenizing {', '.join(filter(None, (named, about)))}"
    say(f"{line} ...")
    with long_wait(line, AGAIN_S):
        try:
            return answer.get(timeout=max(0, limit - SLOW_S))
        except Empty:
            raise TooSlow(
                f"tokenizer.json needs over {limit:.0f} s for {about}; expected a shorter text, or "
                "a pattern that splits it into words"
            ) from None
