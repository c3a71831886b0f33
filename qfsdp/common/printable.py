"""Text of others for a terminal: answers of a model, samples, names of files, errors with these.

Values of keys that look like secrets are neither stored nor printed.
"""

from __future__ import annotations

import re
from typing import Any

READ: dict[str, str] = {}  # value that a config has read from the environment -> its interpolation
# Control characters, lone surrogates, ends of lines other than \n, and marks that turn the
# direction of text. A terminal obeys ESC and U+009B: they move the cursor, clear, and set titles.
_OTHERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The text with escapes such as "\x1b" for what a terminal would obey; "\n" and "\t" stay."""
    return _OTHERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_one_line(text: str) -> str:
    r"""As `printable`, with escapes for "\n" and "\t" too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_json(text: str) -> str:
    r"""JSON text with JSON's own escapes ("\u009b") in its strings: the same values."""
    return _OTHERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def redacted(text: str) -> str:
    """A message with interpolations in place of what they have read from the environment."""
    for value, written in sorted(READ.items(), key=lambda entry: -len(entry[0])):
        if len(value) >= 8:
            text = text.replace(value, written)
        else:  # "1" stands in every message
            text = text.replace(repr(value), repr(written))
    return text


SECRET = "***"
_SECRET_NAMES = re.compile(
    r"(.*[_-])?(api_?key|secret|password|passwd|passphrase|credentials?|bearer|authorization"
    r"|(access|private|secret|auth|account|license)_?key"
    r"|(api|hf|hub|auth|access|refresh|bearer|session|secret|user|wandb|read|write)_?token|token)",
    re.IGNORECASE,
)
# Tokens of a tokenizer.
_TOKENS = re.compile(r".*(eos|bos|pad|unk|mask|sep|cls|image|stop|end|begin|start)_?token", re.I)


def is_secret(name: str) -> bool:
    """Whether a key is named like a secret: api_key, hf_token, password; not eos_token."""
    return bool(_SECRET_NAMES.fullmatch(name)) and not _TOKENS.fullmatch(name)


def masked(value: Any, name: str = "") -> Any:
    """A tree of plain values in which texts and numbers of keys that look like secrets are
    "***"."""
    if isinstance(value, dict):
        return {key: masked(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [masked(entry, name) for entry in value]
    interpolation = isinstance(value, str) and "${" in value
    plain = value is None or isinstance(value, bool) or interpolation
    return value if plain or not is_secret(name) else SECRET


def masked_word(word: str) -> str:
    """A `key=value` word of a command line with its value masked if the key looks like a secret."""
    key, equals, value = word.partition("=")
    return f"{key}={SECRET}" if value and is_secret(key.rpartition(".")[2]) else word
