"""Checks the normalizer of a `tokenizer.json` before `tokenizers` loads it.

A normalizer may make a short text a very long one, and a regular expression in it may try so many
ways that it never ends. Loading applies the normalizer to the added tokens, and nothing can
interrupt it. So one with regular expressions is tried in a process of its own first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_GROWTH = 100  # of a text in a normalizer
LIMIT_S = 60.0  # the trial takes 0.3 to 2 s


def check_normalizer(file: Path) -> None:
    """Raises UserError if the normalizer or decoder of `file` makes a text over `LARGEST_GROWTH`
    times longer, or if the file cannot be loaded within `LIMIT_S`."""
    from qfsdp.common.errors import UserError

    parts = _parts(file)
    with_regex = any("Regex" in rule["pattern"] for rule in _replacements(parts))
    for part, growth in _tried(file) if with_regex else _growths(parts):
        if growth > LARGEST_GROWTH:
            found = f"its {part} makes a text over {growth:.0f} times longer"
            raise UserError(f"{file}: {found}; expected at most {LARGEST_GROWTH} times")


def _tried(file: Path) -> list[tuple[str, float]]:
    """`_growths` in a process that loads the file as well."""
    from qfsdp.common.errors import UserError
    from qfsdp.common.long_waits import long_wait

    command = [sys.executable, "-P", __file__, str(file)]
    with long_wait(f"trying the normalizer of {file}"):
        try:
            done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            wrong = f"its normalizer needs over {LIMIT_S:.0f} s for the added tokens"
            raise UserError(f"{file}: {wrong}; expected patterns that end") from None
    if done.returncode < 0:
        wrong = f"loading it is ended by signal {-done.returncode}"
        raise UserError(f"{file}: {wrong}; expected a file that fits in memory")
    return [tuple(pair) for pair in json.loads(done.stdout or b"[]")]  # empty: loading says why


def _parts(file: Path) -> dict[str, Any]:
    """The normalizer and the decoder of a `tokenizer.json`; none if it cannot be read."""
    try:
        settings = json.loads(file.read_bytes())
        return {name: settings.get(name) for name in ("normalizer", "decoder")}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}  # loading says why


def _growths(parts: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """How many times longer the normalizer and the decoder of a `tokenizer.json` make a text, as
    far as is known before it is loaded."""
    for name, part in parts.items():
        replacements = list(_replacements(part))
        if not replacements:
            continue
        rules = {"type": "Sequence", "normalizers": replacements}  # all that can grow in a decoder
        try:
            growth = _growth(_normalizer(part if name == "normalizer" else rules), replacements)
        except BaseException as error:  # Exception itself, or a panic of Rust code
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        else:
            yield name, growth


def _normalizer(settings: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, models

    empty = json.loads(Tokenizer(models.BPE({}, [])).to_str())
    return Tokenizer.from_str(json.dumps(empty | {"normalizer": settings})).normalizer


def _growth(normalizer: Any, replacements: list[dict[str, Any]]) -> float:
    """How many times longer a normalizer makes a text of all that its replacements find and write;
    its steps are followed only until it is more than `LARGEST_GROWTH`."""
    found = [str(next(iter(rule["pattern"].values()))) for rule in replacements]
    text = " ".join({*found, *(str(rule["content"]) for rule in replacements)})
    before = max(len(text), 1)
    for step in _steps(normalizer):
        text = step.normalize_str(text)
        if len(text) > LARGEST_GROWTH * before:
            break
    return len(text) / before


def _steps(normalizer: Any) -> Iterator[Any]:
    from tokenizers.normalizers import Sequence

    if not isinstance(normalizer, Sequence):
        yield normalizer
        return
    for index in range(len(normalizer)):
        yield from _steps(normalizer[index])


def _replacements(value: Any) -> Iterator[dict[str, Any]]:
    """The rules of a normalizer or decoder that replace a pattern by a text, at any depth."""
    if isinstance(value, dict):
        if "content" in value and isinstance(value.get("pattern"), dict) and value["pattern"]:
            yield value
        for inner in value.values():
            yield from _replacements(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _replacements(inner)


if __name__ == "__main__":
    from tokenizers import Tokenizer

    print(json.dumps(list(_growths(_parts(Path(sys.argv[1]))))), flush=True)
    Tokenizer.from_file(sys.argv[1])
