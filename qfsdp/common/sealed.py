"""JSON files that end with their own digest, so that a changed byte is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfsdp.common.files import to_json

SEAL = "sealed"  # the last key: the SHA-256 of the text, without this value


class Damaged(Exception):
    """A file or folder is not as it was written; the message says which and how."""


def sealed_json(values: Mapping[str, Any]) -> str:
    """`values` as JSON that ends with its own digest."""
    text = to_json({**values, SEAL: ""}, indent=2) + "\n"
    start, _, end = text.rpartition(f'"{SEAL}": ""')
    return f'{start}"{SEAL}": "{hashlib.sha256(text.encode()).hexdigest()}"{end}'


def read_sealed(path: Path, older: bool = False) -> dict[str, Any]:
    """The values of a file written from `sealed_json`, or of one without a digest.

    Args:
        older: versions that wrote this kind of file with "files" wrote no digest of itself.

    Raises:
        Damaged: the file is missing, is not a JSON object, or does not match its digest.
    """
    name = path.name
    try:
        if not path.is_file():
            raise Damaged(f"{name}: {'not a file' if path.exists() else 'missing'}")
        text = path.read_bytes().decode()
        values = json.loads(text)
    except OSError as error:
        raise Damaged(f"{name}: unreadable ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise Damaged(f"{name}: not JSON") from None
    if not isinstance(values, dict):
        raise Damaged(f"{name}: not a JSON object")
    seal = values.pop(SEAL, None)
    if seal is not None or ("files" in values and not older):
        before, _, after = text.rpartition(str(seal))
        if hashlib.sha256((before + after).encode()).hexdigest() != seal:
            raise Damaged(f"{name}: content changed (SHA-256)")
    return values
