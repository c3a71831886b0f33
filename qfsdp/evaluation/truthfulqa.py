"""Rows of TruthfulQA's multiple-choice tasks, from the CSV file of its repository."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError


def truthfulqa_rows(file: Path) -> list[dict[str, Any]]:
    """Multiple-choice questions from the CSV file of the TruthfulQA repository.

    Follows the repository's own evaluation (arXiv:2109.07958). MC1 has the best answer and all
    incorrect ones, MC2 all correct and all incorrect ones. Each ends with a period.

    The hub's `multiple_choice` rows have choices that were picked by hand, and this file does not
    have them. So scores differ. Raises UserError: the file lacks one of the four columns."""
    needed = ("Question", "Best Answer", "Correct Answers", "Incorrect Answers")
    rows = []
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise UserError(f"{file}: no column {missing[0]!r}; expected {', '.join(needed)}")
        for row in reader:
            best, right, wrong = (_answers(row[name]) for name in needed[1:])
            best = best[:1]
            if best[0] not in right:
                right = best + right
            rows.append(
                {
                    "question": row["Question"],
                    "mc1_targets": _targets(best, wrong),
                    "mc2_targets": _targets(right, wrong),
                }
            )
    return rows


def _answers(cell: str) -> list[str]:
    """The answers of a cell, separated by semicolons. Adds final periods, removes duplicates."""
    found = [answer.strip() for answer in cell.split(";")]
    ended = [answer if answer.endswith(".") else f"{answer}." for answer in found if answer]
    return list(dict.fromkeys(ended))


def _targets(right: list[str], wrong: list[str]) -> dict[str, list[Any]]:
    return {"choices": right + wrong, "labels": [1] * len(right) + [0] * len(wrong)}
