"""Shapes of known models, so that an estimate needs no download."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError

_FILE = (
    Path(__file__).parent / "known_models.json"
)  # name -> the fields of config.json that give the shape
# Words in a model's name that do not change its shape.
_VARIANTS = {"meta", "instruct", "chat", "it", "hf", "base", "bnb", "4bit", "nf4", "hqq"}


def find_config(path: str) -> dict[str, Any]:
    """The parsed `config.json` of a model folder or of a known model.

    A known model is found by the last part of `path`, in any variant:
    "models/Meta-Llama-3-70B-Instruct", "Qwen/Qwen2.5-7B".

    Raises:
        UserError: `config.json` cannot be read; or `path` is neither a folder nor a known model.
    """
    file = Path(path).expanduser() / "config.json"
    if file.exists():
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read: {error}; expected JSON") from None
        return config
    known: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    if (name := _known_name(Path(path).name, known)) is None:
        raise UserError(
            f"model.path: '{path}' is not a model folder; expected a folder with config.json, or "
            f"a known model: {', '.join(known)}"
        )
    return known[name]


def _known_name(name: str, known: dict[str, dict[str, Any]]) -> str | None:
    """The longest known name that `name` begins with, else the first that begins with `name`."""
    words = _words(name)
    found = [c for c in known if words[: len(_words(c))] == _words(c)]
    if not found and len(words) > 1:
        return next((c for c in known if _words(c)[: len(words)] == words), None)
    return max(found, key=len, default=None)


def _words(name: str) -> list[str]:
    name = re.sub(r"^llama(?=\d)", "llama-", name.lower().removeprefix("meta-"))
    return [word for word in name.split("-") if word not in _VARIANTS]
