"""Generates grade-school arithmetic word problems for demos and tests.

A problem is a template filled with names, a thing and small numbers. The answer shows the
computation in one or two sentences and ends with a line `#### N`, as in GSM8K:

    {"question": "Mia has 4 bags with 6 apples each. ...", "answer": "... 4 * 6 = 24 ...\\n#### 24"}

The answer of a template contains its computation. `[total = a * b]` is evaluated and written as
`4 * 6 = 24`. Later steps may use `total`, and the last step is the result. Numbers are drawn again
until every step gives a non-negative integer.
"""

from __future__ import annotations

import json
import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path

# fmt: off
NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kira", "Leo", "Mia",
    "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Uma", "Vera", "Will", "Yara", "Zoe",
)
THINGS = (
    "apples", "pears", "marbles", "stickers", "pencils", "shells", "buttons", "cookies", "coins",
    "stamps", "cards", "beads", "plums", "crayons", "eggs", "balloons",
)
# fmt: on
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}

_STEP = re.compile(r"\[(\w+) = (\w+) ([-+*/]) (\w+)\]")


@dataclass(frozen=True)
class Template:
    """One kind of problem.

    Fields:
        question: text with `{name}`, `{other}` (a second name), `{things}` and drawn numbers.
        answer: text with the same fields and with steps `[result = left op right]`. The last step
            is the answer.
        numbers: the range of each drawn number, both ends included.
    """

    question: str
    answer: str
    numbers: dict[str, tuple[int, int]]


TEMPLATES = (
    Template(
        "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
        "{name} has [r = a + b] {things}.",
        {"a": (2, 60), "b": (2, 40)},
    ),
    Template(
        "{name} had {a} {things} and gave {b} of them to {other}. How many are left?",
        "There are [r = a - b] {things} left.",
        {"a": (5, 90), "b": (2, 60)},
    ),
    Template(
        "{name} has {a} bags with {b} {things} in each bag. How many {things} is that in all?",
        "The bags hold [r = a * b] {things}.",
        {"a": (2, 12), "b": (2, 12)},
    ),
    Template(
        "{name} shares {a} {things} equally among {b} friends. How many does each friend get?",
        "Each friend gets [r = a / b] {things}.",
        {"a": (6, 96), "b": (2, 9)},
    ),
    Template(
        "{name} buys {a} notebooks for ${b} each and a pen for ${c}. How much is that in dollars?",
        "The notebooks cost [n = a * b] dollars. Together it is [r = n + c] dollars.",
        {"a": (2, 9), "b": (2, 9), "c": (1, 9)},
    ),
    Template(
        "{name} has ${a} and buys {b} tickets for ${c} each. How many dollars are left?",
        "The tickets cost [t = b * c] dollars. That leaves [r = a - t] dollars.",
        {"a": (20, 100), "b": (2, 8), "c": (2, 10)},
    ),
    Template(
        "A box holds {a} rows of {b} {things}. {name} takes {c} of them. How many are left?",
        "The box held [t = a * b] {things}. Now [r = t - c] are left.",
        {"a": (2, 10), "b": (3, 10), "c": (2, 20)},
    ),
    Template(
        "{name} has {a} {things} and {other} has {b} times as many. "
        "How many do they have together?",
        "{other} has [t = a * b] {things}. Together they have [r = a + t].",
        {"a": (2, 20), "b": (2, 6)},
    ),
    Template(
        "{name} has {a} {things}. {other} has {b} fewer. How many do they have together?",
        "{other} has [t = a - b] {things}. Together they have [r = a + t].",
        {"a": (6, 50), "b": (2, 30)},
    ),
    Template(
        "{name} reads {a} pages on each of {b} days. The book has {c} pages. "
        "How many pages are still to read?",
        "{name} has read [t = a * b] pages. There are [r = c - t] pages to read.",
        {"a": (4, 20), "b": (2, 7), "c": (30, 200)},
    ),
    Template(
        "{name} earns ${a} an hour and works {b} hours a day. "
        "How many dollars does {name} earn in {c} days?",
        "A day brings [t = a * b] dollars. In all it is [r = t * c] dollars.",
        {"a": (5, 20), "b": (2, 8), "c": (2, 6)},
    ),
    Template(
        "{name} packs {a} red and {b} blue {things} into boxes of {c}. How many boxes are filled?",
        "There are [t = a + b] {things}. They fill [r = t / c] boxes.",
        {"a": (4, 40), "b": (4, 40), "c": (2, 10)},
    ),
    Template(
        "{a} {things} cost ${b} altogether. How many dollars do {c} {things} cost?",
        "One costs [t = b / a] dollars. So {c} of them cost [r = t * c] dollars.",
        {"a": (2, 9), "b": (4, 72), "c": (2, 12)},
    ),
    Template(
        "A bus carries {a} people. At a stop {b} get off and {c} get on. "
        "How many people are on the bus now?",
        "After {b} get off there are [t = a - b] people. Then there are [r = t + c].",
        {"a": (10, 60), "b": (2, 30), "c": (2, 20)},
    ),
    Template(
        "{name} walks {a} minutes to school and {b} minutes back. "
        "How many minutes is that in {c} days?",
        "One day takes [t = a + b] minutes. In {c} days it is [r = t * c] minutes.",
        {"a": (4, 25), "b": (4, 25), "c": (2, 7)},
    ),
    Template(
        "{name} picks {a} {things}, drops {b} and puts the rest equally into {c} baskets. "
        "How many are in each basket?",
        "There are [t = a - b] {things} left. Each basket gets [r = t / c].",
        {"a": (10, 80), "b": (1, 12), "c": (2, 8)},
    ),
    Template(
        "{name} saves ${a} a week for {b} weeks and gets ${c} from {other}. "
        "How many dollars does {name} have?",
        "{name} saves [t = a * b] dollars. With the gift it is [r = t + c] dollars.",
        {"a": (2, 20), "b": (2, 12), "c": (5, 50)},
    ),
    Template(
        "{name} has {a} {things}, loses {b}, and then doubles what is left. "
        "How many {things} does {name} have now?",
        "After the loss there are [t = a - b] {things}. Twice that is [r = t * 2].",
        {"a": (6, 50), "b": (2, 30)},
    ),
    Template(
        "A shirt costs ${a} and a hat ${b}. {name} pays with ${c}. How many dollars come back?",
        "Both cost [t = a + b] dollars. The change is [r = c - t] dollars.",
        {"a": (8, 40), "b": (4, 30), "c": (20, 100)},
    ),
    Template(
        "{name} bakes {a} trays of {b} cookies and sells them in bags of {c} for ${d} a bag. "
        "How many dollars does {name} earn?",
        "There are [t = a * b] cookies in [n = t / c] bags. They bring [r = n * d] dollars.",
        {"a": (2, 6), "b": (4, 12), "c": (2, 8), "d": (2, 9)},
    ),
)


def generate(count: int, seed: int) -> list[dict[str, str]]:
    """`count` different problems `{"question", "answer"}`. They depend on `seed` only.

    Raises:
        ValueError: the templates have too few different problems.
    """
    rng = random.Random(seed)
    problems: dict[str, str] = {}
    for _ in range(20 * count + 100):
        if len(problems) == count:
            break
        question, answer = _fill(rng.choice(TEMPLATES), rng)
        problems.setdefault(question, answer)
    else:
        raise ValueError(f"found only {len(problems)} different problems; expected {count}")
    return [{"question": question, "answer": answer} for question, answer in problems.items()]


def write_splits(
    out_dir: Path, train: int = 2000, heldout: int = 200, seed: int = 0
) -> tuple[Path, Path]:
    """Writes `train.jsonl` and `heldout.jsonl`, without common questions. Returns their paths."""
    out_dir.mkdir(parents=True, exist_ok=True)
    problems = generate(train + heldout, seed)
    paths = (out_dir / "train.jsonl", out_dir / "heldout.jsonl")
    for path, rows in zip(paths, (problems[:train], problems[train:]), strict=True):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
    return paths


def _fill(template: Template, rng: random.Random) -> tuple[str, str]:
    """Question and answer of a template, with numbers for which all steps are valid."""
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": rng.choice(THINGS)}
    while True:
        numbers = {key: rng.randint(*ends) for key, ends in template.numbers.items()}
        answer = _compute_steps(template.answer, dict(numbers))
        if answer is not None:
            break
    return (
        template.question.format(**words, **numbers),
        answer.format(**words, **numbers),
    )


def _compute_steps(answer: str, values: dict[str, int]) -> str | None:
    """The answer with its steps computed and `#### N` added.

    Adds the results of the steps to `values`. Returns None if a result is not a non-negative
    integer.
    """
    for step in _STEP.finditer(answer):
        result, left_name, sign, right_name = step.groups()
        left = values[left_name] if left_name in values else int(left_name)
        right = values[right_name] if right_name in values else int(right_name)
        if sign == "/" and left % right:
            return None
        values[result] = OPERATIONS[sign](left, right)
        if values[result] < 0:
            return None
        answer = answer.replace(step[0], f"{left} {sign} {right} = {values[result]}")
    return f"{answer}\n#### {values[result]}"
