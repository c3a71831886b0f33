"""Shapes of known models, for estimates before anything is downloaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError

_FILE = (
    Path(__file__).parent / "known_models.json"
)  # name -> what of its config.json says its shape
# Of one shape.
_VARIANTS = {"meta", "instruct", "chat", "it", "hf", "base", "bnb", "4bit", "nf4", "hqq"}


def find_config(path: str) -> dict[str, Any]:
    """The parsed `config.json` of a model folder, or of a known model that the last part of `path`
    names, in whatever variant: "models/Meta-Llama-3-70B-Instruct", "Qwen/Qwen2.5-7B".

    Raises:
        UserError: `config.json` cannot be read; or there is no such folder and no such model.
    """
    file = Path(path).expanduser() / "config.json"
    if file.exists():
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
        return config
    known: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    if (name := _known_name(Path(path).name, known)) is None:
        raise UserError(
            f"model.path: '{path}' is no model folder, and not the name of a known model: "
            f"{', '.join(known)}"
        )
    return known[name]


def _known_name(name: str, known: dict[str, dict[str, Any]]) -> str | None:
    """The known model that `name` begins with, the longest; or the first that begins with it."""
    words = _words(name)
    found = [c for c in known if words[: len(_words(c))] == _words(c)]
    if not found and len(words) > 1:
        return next((c for c in known if _words(c)[: len(words)] == words), None)
    return max(found, key=len, default=None)


def _words(name: str) -> list[str]:
    name = re.sub(r"^llama(?=\d)", "llama-", name.lower().removeprefix("meta-"))
    return [word for word in name.split("-") if word not in _VARIANTS]
