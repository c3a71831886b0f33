"""The one function through which text goes to a tokenizer of `tokenizers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qfsdp.cli.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


def encode(backend: Tokenizer, text: str) -> Encoding:
    """The tokens of a text, without those that the post-processor adds.

    Nothing is checked ahead: only a text that cannot be tokenized costs more.

    Raises:
        UserError: the text has half of a surrogate pair, or the tokenizer fails on it, as a regular
            expression of `tokenizer.json` does that tries too many ways (a Rust panic).
    """
    try:
        return backend.encode(text, add_special_tokens=False)
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
