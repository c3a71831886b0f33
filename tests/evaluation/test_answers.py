"""Numbers in answers: a table checked by hand, and all gold answers of GSM8K's test set."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from qfsdp.evaluation.answers import parse_answer, same_answer
from tests.json_lines import json_lines

GSM8K = Path("../shared/data/gsm8k/test.jsonl")

TABLE: list[tuple[str, str | None]] = [
    # plain numbers, signs
    ("18", "18"),
    ("1000", "1000"),
    ("1000.0", "1000"),
    ("007", "7"),
    (".5", "1/2"),
    ("-5", "-5"),
    ("−5", "-5"),  # unicode minus
    ("–5 degrees", "-5"),  # en dash
    ("+5", "5"),
    ("(-5)", "-5"),
    ("10-5", "5"),
    ("pages 5–10", "10"),
    ("10 - 4", "4"),
    ("x = - 5", "-5"),
    ("no number at all", None),
    ("", None),
    ("x2 and b17", None),
    # separators
    ("1,000", "1000"),
    ("1,000,000.50", "1000000.5"),
    ("12,34,567", "1234567"),
    ("1,00", "1"),
    ("3,5", "3.5"),
    ("1000,50", "1000.5"),
    ("1,2,3", "3"),
    ("1,2345", "2345"),
    ("1.000", "1"),
    ("1.000.000", "1000000"),
    ("1.000.000,50", "1000000.5"),
    ("1.000,50", "1000.5"),
    ("1{,}000", "1000"),
    ("12\\,500", "12500"),
    ("12\u202f500", "12500"),
    ("in 1,000, or more", "1000"),
    # currency, units, percent, trailing marks
    ("$3.50", "3.5"),
    ("-$3.50", "-3.5"),
    ("$-3.50", "-3.5"),
    ("\\$1,234.56", "1234.56"),
    ("US$20", "20"),
    ("€7.", "7"),
    ("She pays $18.00.", "18"),
    ("18 eggs", "18"),
    ("5kg", "5"),
    ("25%", "25"),
    ("12.5 %.", "12.5"),
    ("3.5 million dollars", "3500000"),
    ("2 thousand", "2000"),
    # fractions
    ("3/4", "3/4"),
    ("-3/4", "-3/4"),
    ("\\frac{3}{4}", "3/4"),
    ("-\\dfrac{3}{4}", "-3/4"),
    ("\\frac{-3}{4}", "-3/4"),
    ("1 1/2", "3/2"),
    ("-1 1/2", "-3/2"),
    ("1\\frac{1}{2}", "3/2"),
    ("\\frac34", "3/4"),
    ("1½ cups", "3/2"),
    ("½", "1/2"),
    ("10 20/5", "4"),
    ("1/0", None),
    ("1.5/2", "3/4"),
    # scientific
    ("1e3", "1000"),
    ("2.5E-3", "1/400"),
    ("3 x 10^5", "300000"),
    ("3.2 \\times 10^{-2}", "0.032"),
    ("6 × 10^8 m", "600000000"),
    # marks of the final answer
    ("2 + 3 = 5\n#### 5", "5"),
    ("#### 1,450,000", "1450000"),
    ("#### -10", "-10"),
    ("#### 5\nQuestion: 9 cats\n#### 9", "5"),
    ("#### Step 1: add\n5 + 5 = 10", "10"),
    ("#### 1. Add them\n5 + 5 = 10", "10"),
    ("#### $5 + $6 = $11 in 2 days", "11"),
    ("so \\boxed{42} of 50", "42"),
    ("\\boxed{\\frac{1}{3}} of 50", "1/3"),
    ("\\boxed{x = 7}", "7"),
    ("\\boxed{12\\text{ cm}^2}", "12"),
    ("\\boxed{1} no, \\boxed{2}", "2"),
    ("7 tries, \\boxed{\\text{none}}", None),
    ("The answer is 18. It took 3 steps.", "18"),
    ("The answer is: **18** eggs for 2 days.", "18"),
    ("the final answer is $18.", "18"),
    ("The answer is\n\n$$18$$", "18"),
    ("The answer is 9 + 9 = 18 eggs", "18"),
    ("The answer is that each of 3 gets 6.", "6"),
    ("The answer is 17. No, the answer is 18. Right?", "18"),
    ("**Answer:** 18 eggs in 3 days", "18"),
    ("Answer: she has 48/2 = 24 in May, so 72 in all.", "72"),
    ("Thus **18** eggs, from 3 ducks", "18"),
    ("**Step 1:** 3 * 6 gives 18", "18"),
    ("First 3, then 6, so 18 eggs.", "18"),
]


@pytest.mark.parametrize(("text", "value"), TABLE, ids=[text[:40] for text, _ in TABLE])
def test_table(text: str, value: str | None) -> None:
    assert parse_answer(text) == (None if value is None else Fraction(value))


def test_sameness_is_exact_and_no_answer_is_never_right() -> None:
    def same(a: str, b: str) -> bool:
        return same_answer(parse_answer(a), parse_answer(b))

    assert same("1,000", "1000.0") and same("3/4", "0.75") and same("1e-1", "0.10")
    assert not same("10/3", "3.33") and not same("5", "-5")
    assert not same_answer(None, None) and not same("none", "nothing") and not same("5", "none")
    big = "123456789012345678901234567890"
    assert same(big, big) and not same(big, big[:-1] + "1")


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs {GSM8K}")
def test_every_gold_answer_of_gsm8k() -> None:
    golds = [line["answer"] for line in json_lines(GSM8K)]
    assert len(golds) == 1319
    for gold in golds:
        stated = int(gold.rpartition("####")[2].replace(",", ""))
        assert parse_answer(gold) == stated
        # Forms that a model may write.
        assert parse_answer(f"so **{stated:,}.00** in 3 days") == stated
        assert parse_answer(f"The answer is ${stated} for 2 people.") == stated
