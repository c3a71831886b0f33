"""Questions that are made from a seed, for trying a judge without data: arithmetic with references,
writing, explaining, lists, and rewriting; every second one has a second turn."""

from __future__ import annotations

import random

from qfsdp.evaluation.judging.questions import Question

THINGS = ("rain", "bread", "a bicycle", "the moon", "a library", "salt", "a bridge", "sleep")
PLACES = ("a harbour", "a night train", "an empty school", "a mountain hut", "a market hall")
READERS = ("a child of eight", "a busy nurse", "a retired engineer", "a new neighbour")
SENTENCES = (
    "The meeting was held by us because of the fact that the budget was not enough.",
    "Due to rain being heavy it was decided that the game should be not played by the teams.",
    "He said that what he said before was something that he had not meant to say.",
)
STYLES = ("clear and short", "friendly", "formal", "fit for a headline")
SECOND = "Now say the same in one sentence."


def generated_questions(count: int = 40, seed: int = 0) -> list[Question]:
    """The same questions for the same arguments, at most 60; no two are equal."""
    numbers, kinds = random.Random(seed), (_arithmetic, _writing, _explaining, _list, _rewriting)
    found: list[Question] = []
    while len(found) < count:
        at = len(found)
        category, asked, reference = kinds[at % len(kinds)](numbers)
        if any(asked == question.turns[0] for question in found):
            continue
        turns: tuple[str, ...] = (asked,)
        if at % 2 and not reference:
            turns = (asked, SECOND)
        references = (reference,) if reference else ()
        found.append(Question(f"generated-{at + 1}", category, turns, references))
    return found


def _arithmetic(numbers: random.Random) -> tuple[str, str, str]:
    boxes, each, sold = (numbers.randint(low, 40) for low in (3, 5, 1))
    left = boxes * each - sold
    asked = f"A shop has {boxes} boxes of {each} apples and sells {sold}. How many are left?"
    return "arithmetic", asked, f"{boxes} * {each} - {sold} = {left}"


def _writing(numbers: random.Random) -> tuple[str, str, str]:
    place, thing = numbers.choice(PLACES), numbers.choice(THINGS)
    return "writing", f"Write four sentences about {place} in which {thing} matters.", ""


def _explaining(numbers: random.Random) -> tuple[str, str, str]:
    thing, reader = numbers.choice(THINGS), numbers.choice(READERS)
    return "explaining", f"Explain to {reader} why people need {thing}.", ""


def _list(numbers: random.Random) -> tuple[str, str, str]:
    count, thing = numbers.randint(3, 6), numbers.choice(THINGS)
    return "list", f"Name {count} things that have to do with {thing}, one in each line.", ""


def _rewriting(numbers: random.Random) -> tuple[str, str, str]:
    style, sentence = numbers.choice(STYLES), numbers.choice(SENTENCES)
    return "rewriting", f"Make this sentence {style}: {sentence}", ""
