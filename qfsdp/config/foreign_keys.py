"""Keys of torchtune, Axolotl, LLaMA-Factory, Unsloth, HF Trainer, TRL and PEFT, and ours for them.

`foreign_keys.yaml` has them, and says what an answer is. `tests/cli/test_foreign_keys.py` checks
that every key of an answer exists, and takes the value.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Answer = str | dict[str, str]  # by the value that the key was given; "": for all others


class ForeignKeys(NamedTuple):
    """What `foreign_keys.yaml` has, by key.

    Fields:
        answers: by other projects' keys.
        off: what `false` of a key means for ours, by our key; and where it means something else,
            "our_key=value" by the other project's key.
    """

    answers: dict[str, Answer]
    off: dict[str, str]


@cache
def foreign_keys() -> ForeignKeys:
    """Reads the file: not before somebody has used a key that we do not have."""
    tree = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    answers: dict[str, Answer] = dict(_by_word(tree["answers"]))
    for keys, of_values in tree["by_value"].items():
        answers |= dict.fromkeys(keys.split(), _by_word(of_values))
    return ForeignKeys(answers, tree["if_false"] | _by_word(tree["if_false_of"]))


def _by_word(words: dict[str, str]) -> dict[str, str]:
    """Word -> answer, of answer -> words."""
    return {word: answer for answer, of in words.items() for word in of.split() or [""]}


def answer_to(key: str, value: Any = None) -> str:
    """What qfsdp has for another project's key: a key, "key=value", or a sentence; "" if unknown.

    Args:
        key: with its sections, such as "model.lora_rank"; a last name alone is known too.
        value: that it was given.
    """
    answers, off = foreign_keys()
    if isinstance(value, dict) and len(value) == 1 and f"{key}.{next(iter(value))}" in answers:
        return answer_to(f"{key}.{next(iter(value))}", *value.values())
    found = answers.get(key, "")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(found, dict):
        found = found.get(text, found[""])
    ours, given, _ = found.partition("=")
    if not value and given and " " not in found:  # null or nothing is no choice of our value
        return (off.get(key) or f"{ours}={off.get(ours, 'null')}") if value is False else ours
    return found


def in_words(answer: str, has_it: bool = True) -> str:
    """An answer as the end of a message; `has_it`: whether the recipe has its key."""
    if not answer or " " in answer:
        return answer and f"; {answer}"
    return f"; here it is '{answer}'" + ("" if has_it else ", which this recipe does not have")
