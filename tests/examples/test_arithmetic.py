"""The generated problems are correct, distinct, short and depend on the seed only."""

from __future__ import annotations

import json
import operator
import re
from pathlib import Path

import pytest

from examples.demo import arithmetic, pairs
from examples.demo.arithmetic import TEMPLATES, Template, generate, write_splits
from qfsdp.evaluation.answers import parse_answer

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
CHECK = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def test_answers_are_correct() -> None:
    problems = generate(3000, seed=0)
    for problem in problems:
        reasoning, result = problem["answer"].split("\n#### ")
        steps = EQUATION.findall(reasoning)
        assert 1 <= len(steps) <= 3
        for left, sign, right, value in steps:
            assert CHECK[sign](int(left), int(right)) == int(value) >= 0
        assert int(result) == int(steps[-1][3])
        # Every number in the computation is given or was computed before.
        known = set(re.findall(r"\d+", problem["question"])) | {step[3] for step in steps} | {"2"}
        assert {number for step in steps for number in (step[0], step[2])} <= known
        assert not re.search(r"[{}\[\]]", problem["question"] + problem["answer"])
        assert len(problem["question"].split()) < 40 and len(reasoning.split()) < 40
    assert len({problem["question"] for problem in problems}) == len(problems)


def test_every_template_is_used() -> None:
    assert len(TEMPLATES) >= 15
    shapes = {re.sub(r"\d+", "N", problem["answer"]) for problem in generate(3000, seed=1)}
    for template in TEMPLATES:
        tail = re.escape(re.split(r"[\]}]", template.answer)[-1])
        assert any(re.search(f"{tail}\n#### N$", shape) for shape in shapes)


def test_deterministic() -> None:
    assert generate(50, seed=3) == generate(50, seed=3) != generate(50, seed=4)
    assert generate(80, seed=3)[:50] == generate(50, seed=3)


def test_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (Template("{a}?", "[r = a + a]", {"a": (1, 3)}),)
    monkeypatch.setattr(arithmetic, "TEMPLATES", few)
    assert len(generate(3, seed=0)) == 3
    with pytest.raises(ValueError, match="only 3 different problems; expected 4"):
        generate(4, seed=0)


def test_splits(tmp_path: Path) -> None:
    train, heldout = write_splits(tmp_path / "new", train=100, heldout=20, seed=5)
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    held = [json.loads(line) for line in heldout.read_text(encoding="utf-8").splitlines()]
    assert (train.name, heldout.name, len(rows), len(held)) == (
        "train.jsonl",
        "heldout.jsonl",
        100,
        20,
    )
    assert not {row["question"] for row in rows} & {row["question"] for row in held}
    assert set(rows[0]) == {"question", "answer"}


def test_pairs_differ_in_the_result_only() -> None:
    made = pairs.pairs(60, seed=3)
    assert made == pairs.pairs(60, seed=3)
    for pair in made:
        chosen, rejected = pair["chosen"], pair["rejected"]
        right, wrong = (answer.rpartition("#### ")[2] for answer in (chosen, rejected))
        assert right != wrong
        assert parse_answer(rejected) == int(wrong)
        step, _, shown = chosen.rpartition(f"= {right}")
        assert rejected == f"{step}= {wrong}{shown.removesuffix(right)}{wrong}"
