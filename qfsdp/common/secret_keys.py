"""Keys of a config that look like secrets; their values are neither stored nor printed."""

from __future__ import annotations

import re
from typing import Any

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
