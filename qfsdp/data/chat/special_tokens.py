"""Encodes special tokens that a message spells as ordinary text.

A question may contain "<|im_end|>". Written by the template into one text, it would look like the
end of the user's turn. Three steps keep the two apart:

1. Before the template runs, each special token in a message is replaced by a character that no
   text uses:                       Hi<|im_end|>  ->  Hi\\U000F0000
2. The template runs. Every special token in the result is now its own:
                                    <|im_start|>user\\nHi\\U000F0000<|im_end|>
3. A copy of the tokenizer encodes the result. It takes "<|im_end|>" for ordinary text, and knows
   the special tokens by random names instead. So the character becomes "<|im_end|>" again, and
   the template's tokens become these names:
                                    {start}user\\nHi<|im_end|>{end}
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.chat_template import ChatTemplate, Conversation, Range
from qfsdp.data.encode import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning (plane 15 of Unicode)."""


class SpecialTokens:
    """The special tokens of a tokenizer.

    Args:
        backend: the tokenizer.
        ids: text -> id of every special token.
    """

    def __init__(self, backend: Tokenizer, ids: Mapping[str, int]) -> None:
        self._backend, self.ids = backend, dict(ids)
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def first_in(self, text: str) -> str | None:
        """The first special token that a text spells, or None."""
        found = self._pattern.search(text)
        return found and found.group()

    def first_inside(self, value: Any) -> str | None:
        """The first special token that a value made of dicts, lists and texts spells, or None."""
        return next(filter(None, map(self.first_in, texts_of(value))), None)

    def hide(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Replaces special tokens in texts by private characters that none of the texts has.

        Args:
            value: texts in dicts and lists: messages, tools.

        Returns:
            The same with other texts, and the special token of each private character.
        """
        used = {character for text in texts_of(value) for character in text}
        unused = (character for character in map(chr, PRIVATE) if character not in used)
        names: dict[str, str] = {}

        def private(found: re.Match[str]) -> str:
            token = found.group()
            if token not in names:
                names[token] = next(unused)
            return names[token]

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(private, value)
            if isinstance(value, Mapping):
                return {hidden(key): hidden(inner) for key, inner in value.items()}
            if isinstance(value, list | tuple):
                return [hidden(inner) for inner in value]
            return value

        return hidden(value), {character: token for token, character in names.items()}

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are ordinary text."""
        ids: list[int] = encode(self._plain[0], text).ids
        return ids

    def encode_chat(
        self, text: str, hidden: Mapping[str, str], spans: Sequence[Range]
    ) -> tuple[list[int], list[bool]]:
        """Encodes a conversation that a template wrote from messages of `hide`.

        Args:
            hidden: the special token of each private character.
            spans: of the text, that are trained.

        Returns:
            The ids, and for each of them whether it is trained: whether its last character is.
            (Byte-level tokenizers may leave the leading space out of a token's offsets.)
        """
        # One extra flag, never trained: an empty token at offset 0 reads index -1.
        flags, tokenizer, ids = bytearray(len(text) + 1), self._backend, dict[int, int]()
        for start, stop in spans:
            flags[start:stop] = b"\1" * (stop - start)
        if hidden:
            tokenizer, names, ids = self._plain
            words, trained = [], bytearray()
            for start, stop, kind in self._parts(text, hidden):
                word = text[start:stop]
                if kind == "text":
                    trained += flags[start:stop]
                else:
                    word = hidden[word] if kind == "hidden" else names[word]
                    trained += flags[stop - 1 : stop] * len(word)
                words.append(word)
            text, flags = "".join(words), trained + b"\0"
        encoding = encode(tokenizer, text)
        found = [ids.get(index, index) for index in encoding.ids] if hidden else encoding.ids
        return found, [bool(flags[stop - 1]) for _, stop in encoding.offsets]

    def _parts(self, text: str, hidden: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
        """Start, end and kind ("text", "hidden", "special") of the parts of a rendered text."""
        pattern = re.compile(f"([{''.join(hidden)}])|{self._pattern.pattern}")
        at = 0
        for found in pattern.finditer(text):
            yield at, found.start(), "text"
            yield found.start(), found.end(), "hidden" if found.group(1) else "special"
            at = found.end()
        yield at, len(text), "text"

    @cached_property
    def _plain(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The second tokenizer; its names of the special tokens; their ids there -> ids."""
        from tokenizers import AddedToken, Tokenizer

        settings = json.loads(self._backend.to_str())
        for token in settings["added_tokens"]:
            token["special"] |= token["content"] in self.ids
        copy = Tokenizer.from_str(json.dumps(settings))
        copy.encode_special_tokens = True
        secret = secrets.token_hex(8)  # a message that guesses a name would forge a turn
        names, ids, added = {}, {}, []
        for index, token in self._backend.get_added_tokens_decoder().items():
            if token.content not in self.ids:
                continue
            name = f"\U0010fffc{secret}.{index}\U0010fffd"
            names[token.content], ids[name] = name, index
            kept = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip")}
            added.append(AddedToken(name, **kept, normalized=token.normalized, special=False))
        copy.add_tokens(added)  # at once: each call builds all of them anew
        new = copy.get_vocab(with_added_tokens=True)
        return copy, names, {new[name]: index for name, index in ids.items()}


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a value made of dicts, lists and texts, keys of dicts included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_of(key)
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def added_tokens(backend: Tokenizer, special_only: bool = False) -> dict[str, int]:
    """Text -> id of every token that was added to the vocabulary."""
    return {
        token.content: index
        for index, token in backend.get_added_tokens_decoder().items()
        if token.special or not special_only
    }


def turn_marks(backend: Tokenizer, template: ChatTemplate) -> dict[str, int]:
    """Text -> id of the tokens that a message must not spell.

    These are the special tokens, and what the template writes around a user's message: some
    tokenizers do not call their <|im_end|> special. Other added tokens, such as <think>, are for
    messages to spell.
    """
    marks = added_tokens(backend, special_only=True)
    others = {
        text: index
        for text, index in added_tokens(backend).items()
        if text not in marks and text[:1] in ("<", "[")  # Gemma adds line breaks
    }
    if others:
        (found,) = template.render([Conversation([{"role": "user", "content": "Hi"}])])
        written = "" if isinstance(found, UserError) else found.text
        marks |= {text: index for text, index in others.items() if text in written}
    return marks
