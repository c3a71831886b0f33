"""The judge of examples/judge, and its whole comparison with few questions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from qfsdp.examples.judge.questions import generated_questions
from qfsdp.examples.judge.verdicts import Turn, pair_messages, rating, single_messages, winner

from examples.judge.rules import REFUSAL, verdict
from tests.json_lines import json_lines

QUESTIONS = generated_questions()
ASKED = QUESTIONS[0]
LEFT = ASKED.references[0].rpartition("= ")[2]
CASES = (  # a question, its reference, an answer that is right, one that is not
    (ASKED.turns[0], ASKED.references[0], f"12 boxes.\n#### {LEFT}", f"{LEFT} or 7"),
    ("Name 3 things that have to do with salt, one in each line.", "", "a\n\nb\nc", "a, b, c"),
    ("Write four sentences about a harbour.", "", "A. B! C? D.", "A. B."),
    (QUESTIONS[1].turns[1], "", "It is 3.5 km.", "It is. It was."),
)


@pytest.mark.parametrize(("asked", "reference", "good", "bad"), CASES)
def test_verdicts(asked: str, reference: str, good: str, bad: str) -> None:
    right, wrong = ([Turn("Before.", "x"), Turn(asked, of, reference)] for of in (good, bad))

    def said(messages: list[dict[str, str]]) -> str:
        return verdict(messages[-1]["content"])

    assert rating(said(single_messages(right))) == 10 and rating(said(single_messages(wrong))) == 1
    assert winner(said(pair_messages(right, wrong))) == "first"
    assert winner(said(pair_messages(wrong, right))) == "second"
    assert winner(said(pair_messages(right, right))) == "tie"
    other = [Turn("Explain to a busy nurse why people need salt.", "x")]
    assert said(single_messages(other)) == said(pair_messages(other, right)) == REFUSAL
    assert winner(REFUSAL) is None and rating(REFUSAL) is None


@pytest.mark.long
def test_the_comparison_is_killed_and_goes_on(smollm2_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("starlette")
    command = [sys.executable, "-m", "qfsdp.examples.judge.run", "--output-dir", str(tmp_path)]
    command += ["--updates", "1", "--questions", "2", "--tokens", "4", "--kill-after", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    keys = [line["key"] for line in json_lines(tmp_path / "exchanges.jsonl")]
    found = re.search(r"killed with (\d+) exchanges", done.stdout)
    assert found is not None
    known = int(found[1])
    # What was there before the kill is not asked again. Later keys may be equal: where both answers
    # are the same, so are the judge's requests of both orders, which are asked at the same time.
    assert not {*keys[:known]} & {*keys[known:]} and known >= 3
    for name in ("rules", "model"):
        games = json.loads((tmp_path / f"results_{name}.json").read_text())["games"]["tuned"]
        counts = ("wins", "losses", "ties", "contradictions")
        # 3 turns in both orders.
        assert 2 * sum(games[key] for key in counts) <= 6 and games["no_verdict"] <= 6
    assert "Traceback" not in done.stdout + done.stderr
    assert "known before" in done.stdout
