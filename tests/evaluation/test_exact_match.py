"""Exact match: prompts, comparison of answers, split over ranks, and the written rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data import hf_tokenizer
from qfsdp.distributed.world import World
from qfsdp.evaluation import exact_match as module
from qfsdp.evaluation.batching import batches_by_length, batches_of_rank
from qfsdp.evaluation.exact_match import ExactMatchConfig, exact_match, read_questions
from qfsdp.evaluation.intervals import wilson
from tests.json_lines import json_lines
from tests.models import cpu_world, load_model

pytestmark = pytest.mark.usefixtures("eager")

ROWS = [
    {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"},
    {"question": "What is 900 + 100, in a long question?", "answer": "#### 1,000"},
    {"question": "What is one half?", "answer": "#### 1/2"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Words:
    """A tokenizer whose tokens are whole answers."""

    def decode(self, tokens: list[int]) -> str:
        return ["It is 5 of 7. #### 5.0", "**1000** apples", "I do not know"][tokens[0]]


def test_answers_are_compared_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        module, "chat_tokens", lambda tokenizer, turns, tools: [0] * len(str(turns))
    )
    monkeypatch.setattr(
        module,
        "generate",
        lambda model, prompts, *rest: [[by_length[len(prompt)]] for prompt in prompts],
    )
    config = ExactMatchConfig(write(tmp_path / "rows.jsonl", ROWS))
    questions = read_questions("exact_match.x", config, Words())
    by_length = {len(question.prompt): number for number, question in enumerate(questions)}
    file = tmp_path / "out.jsonl"
    model: Any = None
    found = exact_match(model, questions, config, Words(), {2}, cpu_world(), 2, file)
    assert (found.right, found.rows, found.unanswered) == (2, 3, 1)
    assert found.accuracy == 2 / 3 and found.interval == wilson(2, 3)
    lines = {line["row"]: line for line in json_lines(file)}
    assert [lines[row]["right"] for row in range(3)] == [True, True, False]
    assert lines[1]["number"] == "1000" and lines[2]["number"] is None
    assert lines[0]["question"] == ROWS[0]["question"] and lines[0]["gold"] == ROWS[0]["answer"]

    config.compare = "text"
    golds = ["x", "**1000** APPLES ", "y"]
    same = [{**row, "answer": gold} for row, gold in zip(ROWS, golds, strict=True)]
    config.source = write(tmp_path / "texts.jsonl", same)
    questions = read_questions("exact_match.x", config, Words())
    assert exact_match(model, questions, config, Words(), {2}, cpu_world(), 2).right == 1


def test_examples_are_earlier_turns_and_not_questions(tmp_path: Path, smollm2_dir: Path) -> None:
    more = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]
    config = ExactMatchConfig(
        write(tmp_path / "rows.jsonl", ROWS),
        shots=3,
        examples=write(tmp_path / "more.jsonl", [*ROWS, *more]),
        system_prompt="Be brief.",
    )
    tokenizer = hf_tokenizer(str(smollm2_dir))
    questions = read_questions("exact_match.x", config, tokenizer)
    texts = [tokenizer.decode(q.prompt, skip_special_tokens=False) for q in questions]
    heads = {text.partition(q.text)[0] for text, q in zip(texts, questions, strict=True)}
    assert len(heads) == 1  # all questions have the same examples
    head = heads.pop()
    assert head.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert head.count("<|im_start|>assistant") == 3 and head.count("####") == 3
    assert not any(row["question"] in head for row in ROWS)
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in texts)
    config.seed = 1
    assert read_questions("exact_match.x", config, tokenizer)[0].prompt != questions[0].prompt


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "/nowhere.jsonl"}, r"^exact_match.x.source: /nowhere.jsonl does not exist"),
        ({"question_column": "q"}, r"rows.jsonl, line 1: no column 'q'; .* question, answer$"),
        ({"answer_column": "a"}, r"rows.jsonl, line 1: no column 'a'; .* question, answer$"),
        ({"answer_column": "question", "max_rows": 3}, r"row 3: no number in the answer 'What is"),
        ({"shots": 2, "examples": "rows"}, r"^exact_match.x.shots: 2; expected at most 0, the"),
    ],
    ids=["source", "question", "answer", "number", "shots"],
)
def test_faulty_entries(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    if "examples" in changes:
        changes = {**changes, "examples": source}
    with pytest.raises(UserError, match=message):
        read_questions("exact_match.x", ExactMatchConfig(**{"source": source, **changes}), None)


def test_batches_have_similar_lengths_and_ranks_equal_numbers() -> None:
    batches = batches_by_length([3, 9, 1, 7, 5], 2)
    assert batches == [[1, 3], [4, 0], [2]]
    cpu = torch.device("cpu")
    shares = [list(batches_of_rank(batches, World(cpu, rank, 2), "x")) for rank in range(2)]
    assert shares == [[[1, 3], [2]], [[4, 0], []]]


@pytest.mark.long
def test_a_real_model(smollm2_dir: Path, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(smollm2_dir))
    config = ExactMatchConfig(write(tmp_path / "rows.jsonl", ROWS), max_new_tokens=12)
    questions = read_questions("exact_match.x", config, tokenizer)
    model = load_model(smollm2_dir, format="none", dtype="bf16")
    found = exact_match(model, questions, config, tokenizer, {2}, cpu_world(), 2)
    assert found.rows == 3 and found.right >= 1


def test_faulty_fields(tmp_path: Path) -> None:
    from tests.tiny import ROOT, load_recipe

    schema = load_recipe("evaluate").Config
    argv = ["--config", str(ROOT / "configs/evaluate.yaml")]
    with pytest.raises(UserError, match=r"^exact_match.arithmetic.shots: -1 is not valid"):
        load_config(schema, [*argv, "exact_match.arithmetic.shots=-1"])
    with pytest.raises(UserError, match=r"^exact_match.arithmetic.examples: None is not valid"):
        load_config(schema, [*argv, "exact_match.arithmetic.examples=null"])
    with pytest.raises(UserError, match=r"exact_match.arithmetic.shot'; did you mean .*shots'"):
        load_config(schema, [*argv, "exact_match.arithmetic.shot=1"])
    with pytest.raises(UserError, match=r"^text.wikitext2.stride: 2000 is not valid; expected"):
        load_config(schema, [*argv, "text.wikitext2.file=x", "text.wikitext2.stride=2000"])
    new = load_config(schema, [*argv, "exact_match.mine.source=x.jsonl"])
    assert new.exact_match["mine"].max_new_tokens == 256
