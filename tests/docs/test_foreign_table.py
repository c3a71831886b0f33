"""The table of other projects' keys says what a run answers."""

from __future__ import annotations

import re

from qfsdp.config.foreign_keys import answer_to
from tests.tiny import ROOT

GUIDE = ROOT / "docs" / "guide" / "from-axolotl-and-trl.md"
ROW = re.compile(r"^\| (.*) \| `([\w.]+(?:=\w+)?)` \|$", re.MULTILINE)
VALUES = {"adapter.method": "lora", "loss._component_": "sigmoid"}
NAME = re.compile(r"'?([\w.]+)")  # the first key of an answer; of several each is quoted


def test_every_key_of_the_table_gets_its_answer() -> None:
    rows = ROW.findall(GUIDE.read_text())
    assert len(rows) > 25
    for theirs, ours in rows:
        for key in re.findall(r"`(\w+)`", theirs):
            found = answer_to(key, VALUES.get(ours, True))
            name = NAME.match(found)[1]  # type: ignore[index]
            assert name == ours.partition("=")[0], key
            assert ours in (found, name), key
