"""The shape of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_parts import DecoderParts
from qfsdp.modules.families import read

EXPANDED = "expanded_layers"  # key of config.json: indices of layers that block expansion added


def read_config(path: str | Path) -> tuple[dict[str, Any], str]:
    """The content of `<path>/config.json`, and the file's name. Raises `UserError`."""
    file = Path(path) / "config.json"
    if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe would be read for ever
        raise UserError(f"{file}: no regular file; expected a Hugging Face model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror
        raise UserError(f"{file}: {why}; expected a Hugging Face model folder") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: holds a {type(config).__name__}; expected a JSON object")
    return config, str(file)


@dataclass(frozen=True)
class DecoderConfig(DecoderParts):
    """The parts of a decoder, as a model folder describes them."""

    @classmethod
    def from_dir(cls, path: str | Path) -> DecoderConfig:
        """Reads `<path>/config.json`. Raises `UserError`, which names the file and the mistake."""
        return cls.from_dict(*read_config(path))

    @classmethod
    def from_dict(cls, config: dict[str, Any], source: str = "config.json") -> DecoderConfig:
        """Reads a parsed Hugging Face `config.json`; `source` names it in errors. Raises
        `UserError` for an architecture, activation or rope type that `Decoder` does not compute,
        and for sizes that are missing, not positive integers, or do not divide."""
        return cls(**vars(read(config, source)))

    @classmethod
    def of_text(cls, path: str | Path) -> DecoderConfig:
        """`from_dir` of a model that takes nothing but text. Raises `UserError`."""
        found = cls.from_dir(path)
        if found.takes_more_than_text:
            why = "takes more than text, and this command writes models of text alone"
            raise UserError(f"model.path: {path} {why}; expected one of those")
        return found
