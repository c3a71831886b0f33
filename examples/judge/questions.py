"""Questions for models that are judged, in MT-bench's format.

A .jsonl file (https://github.com/lm-sys/FastChat, `fastchat/llm_judge/data`); every row has

    {"question_id": 81, "category": "writing", "turns": ["Write ...", "Now shorten ..."],
     "reference": ["...", "..."]}

`turns` are what the user says one after the other. `reference` may be missing; it has answers that
the judge may rely on, one for each turn. `questions.jsonl` beside this file has 40 for trying a
judge without data: arithmetic with references, writing, explaining, lists and rewriting.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.files.json_lines import read_rows

OURS = str(Path(__file__).with_name("questions.jsonl"))


@dataclass(frozen=True)
class Question:
    """What the user says, turn by turn, and a reference answer for each turn, or none at all."""

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[str, ...]


def read_questions(key: str, path: str) -> list[Question]:
    """The questions of a file, in its order. Raises UserError: the file cannot be read, or a row is
    no question; or two have the same id."""
    found = [
        _question(f"{path}, row {number}", row)
        for number, row in enumerate(read_rows(key, path, "question_id", "turns"), 1)
    ]
    ids = [question.id for question in found]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise UserError(f"{key}: '{path}' has question_id {twice} twice; expected each once")
    return found


def generated_questions() -> list[Question]:
    """The 40 questions of `questions.jsonl`."""
    return read_questions("questions", OURS)


def _question(place: str, row: dict[str, Any]) -> Question:
    turns, references = row["turns"], row.get("reference") or []
    for name, texts in (("turns", turns), ("reference", references)):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{place}: {name}: {str(texts)[:60]!r}; expected a list of texts")
    if not turns or len(references) not in (0, len(turns)):
        raise UserError(
            f"{place}: {len(turns)} turns, {len(references)} references; expected at least one "
            "turn, and a reference for each or none"
        )
    category = str(row.get("category", ""))
    return Question(str(row["question_id"]), category, tuple(turns), tuple(references))
