"""lm-eval on our decoder: the same answers and scores as lm-eval's own `hf` model."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.data import hf_tokenizer
from qfsdp.evaluation.intervals import wilson
from qfsdp.evaluation.lm_harness import (
    LMEvalConfig,
    check_tasks,
    evaluate,
    load_tasks,
    run_tasks,
)
from qfsdp.evaluation.truthfulqa import truthfulqa_rows
from tests.models import cpu_world, load_model
from tests.tiny import write_tiny_model_with_tokenizer

pytestmark = pytest.mark.usefixtures("eager")
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the package lm-eval"
)
DATA = Path("../shared/data/eval")
TASKS = ["arc_easy", "arc_challenge", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2"]

PAIRS = [
    ("Question: What is 2 + 2?\nAnswer:", " 4"),
    ("Question: What is 2 + 2?\nAnswer:", " five  apples"),
    ("Question: What is 2 + 2?\nAnswer:", "4"),  # may merge with the token before it
    ("two trailing spaces  ", "after them"),
    ("", " nothing before"),
    ("", "<|im_start|>user"),
    ("<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"),
    ("Über 5,000 naïve 数字", " 漢字 🙂"),
]
ROLLING = ["A text of its own, rolled over.", "<|im_start|>user\nHi"]
UNTIL = [
    ("The capital of France is", {"until": [",", "\n"], "max_gen_toks": 10}),
    ("1, 2, 3, 4,", {"until": ["7"], "max_gen_toks": 12, "do_sample": False}),
    ("A much longer text before it than the other one has. The sea is", {"max_gen_toks": 6}),
]


def requests(kind: str, arguments: list[Any]) -> Any:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=at)
        for at, args in enumerate(arguments)
    ]


def answers(lm: Any) -> tuple[Any, ...]:
    return (
        lm.loglikelihood(requests("loglikelihood", PAIRS)),
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in ROLLING])),
        lm.generate_until(requests("generate_until", UNTIL)),
    )


def ours(folder: Path, batch_size: int) -> tuple[Any, ...]:
    from qfsdp.evaluation.lm_harness_model import HarnessModel

    tokenizer = hf_tokenizer(str(folder))
    model = load_model(folder, format="none")
    return answers(HarnessModel(model, tokenizer, {tokenizer.eos_id}, cpu_world(), batch_size))


def hf(folder: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4, **options)


@pytest.mark.long
@needs_lm_eval
def test_answers_equal_the_hf_model(smollm2_dir: Path) -> None:
    expected = answers(hf(smollm2_dir))
    found = ours(smollm2_dir, 3)
    assert [hit for _, hit in found[0]] == [hit for _, hit in expected[0]]
    assert [value for value, _ in found[0]] == pytest.approx([v for v, _ in expected[0]], abs=1e-3)
    assert found[1] == pytest.approx(expected[1], abs=1e-3)
    assert found[2] == expected[2] and all(found[2])


@needs_lm_eval
@pytest.mark.parametrize("template", ["{{ m.content }}", "{{ m.content | trim }}"])
def test_an_answer_that_is_begun(smollm2_dir: Path, template: str) -> None:
    """As of humaneval_instruct, whose beginning of the answer ends with a line break."""
    from transformers import AutoTokenizer

    from qfsdp.evaluation.lm_harness_model import HarnessModel

    template = "{% for m in messages %}[{{ m.role }}]" + template + "[/{{ m.role }}]{% endfor %}"
    tokenizer, model = hf_tokenizer(str(smollm2_dir), chat_template=template), None
    lm = HarnessModel(model, tokenizer, set(), cpu_world(), 1)  # type: ignore[arg-type]
    oracle = AutoTokenizer.from_pretrained(smollm2_dir)
    for begun in ("The answer is", "The answer is ", "def f():\n", "", "assistant"):
        chat = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": begun}]
        expected = oracle.apply_chat_template(
            chat, chat_template=template, tokenize=False, continue_final_message=True
        )
        assert lm.apply_chat_template(chat, add_generation_prompt=False) == expected


@needs_lm_eval
def test_intervals_and_names_of_metrics(smollm2_dir: Path, tmp_path: Path) -> None:
    """A perplexity had the interval of log-likelihoods; gsm8k's two filters the same name."""
    (tmp_path / "lambada_openai.test.jsonl").write_text(
        "\n".join(json.dumps({"text": f"He opened the {word}"}) for word in ("door", "box", "can"))
    )
    asked = {"question": "2 + 3?", "answer": "#### 5"}
    for split in ("train", "test"):
        (tmp_path / f"gsm8k.{split}.jsonl").write_text(json.dumps(asked))
    folder = write_tiny_model_with_tokenizer(
        tmp_path / "model", smollm2_dir, max_position_embeddings=512
    )
    config = LMEvalConfig(["lambada_openai", "gsm8k"], None, 0, str(tmp_path))
    model, tokenizer = load_model(folder, format="none"), hf_tokenizer(str(folder))
    scores, _ = run_tasks(config, load_tasks(config), model, tokenizer, set(), cpu_world(), 2)
    found = {(score.task, score.metric): score for score in scores}
    assert len(found) == len(scores) == 4
    assert found["lambada_openai", "perplexity"].interval is None
    assert found["lambada_openai", "acc"].interval == wilson(0, 3)
    assert found["gsm8k", "exact_match,strict-match"].rows == 1
    assert ("gsm8k", "exact_match,flexible-extract") in found


@needs_lm_eval
def test_texts_longer_than_the_model(smollm2_dir: Path, tmp_path: Path) -> None:
    folder = write_tiny_model_with_tokenizer(
        tmp_path / "model", smollm2_dir, hidden_size=96, max_position_embeddings=16
    )
    expected = answers(hf(folder))
    alone = ours(folder, 2)
    assert [value for value, _ in alone[0]] == pytest.approx([v for v, _ in expected[0]], abs=1e-3)
    assert alone[1] == pytest.approx(expected[1], abs=1e-3)
    assert alone[2] == expected[2]


@needs_lm_eval
def test_a_stop_string_that_is_a_special_token(smollm2_dir: Path, tmp_path: Path) -> None:
    """It is not in the text, where the answer is cut; generation has to end at it."""
    from qfsdp.evaluation.lm_harness_model import HarnessModel

    folder = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, hidden_size=96)
    model, tokenizer = load_model(folder, format="none"), hf_tokenizer(str(folder))
    asked: dict[str, Any] = {"until": [], "max_gen_toks": 8}

    def answer(lm: Any, until: list[str]) -> str:
        (text,) = lm.generate_until(
            requests("generate_until", [("Say.", asked | {"until": until})])
        )
        return str(text)

    whole = answer(HarnessModel(model, tokenizer, set(), cpu_world(), 1), [])
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    third = tokenizer.encode(whole, False, False)[3]
    text = next(text for text, index in tokenizer.vocabulary.items() if index == third)
    described["added_tokens"].append(described["added_tokens"][0] | {"id": third, "content": text})
    file.unlink()
    file.write_text(json.dumps(described))
    expected = answer(hf(folder), [text])
    found = answer(HarnessModel(model, hf_tokenizer(str(folder)), set(), cpu_world(), 1), [text])
    assert found == expected and 0 < len(found) < len(whole)


@needs_lm_eval
def test_repeats_have_answers_of_their_own(smollm2_dir: Path, tmp_path: Path) -> None:
    """As of gsm8k_cot_self_consistency, which asks 64 times and takes the majority."""
    from qfsdp.evaluation.lm_harness_model import HarnessModel

    folder = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, hidden_size=96)
    tokenizer = hf_tokenizer(str(folder))
    lm = HarnessModel(load_model(folder, format="none"), tokenizer, set(), cpu_world(), 4)
    options = {"max_gen_toks": 5, "do_sample": True, "temperature": 1.0}
    asked = requests("generate_until", [("Say.", options)] * 4 + [("Tell.", options)])
    found = lm.generate_until(asked)
    assert len(set(found)) == 5
    assert lm.generate_until(asked[::-1])[::-1][4] == found[4]


def write_data(folder: Path) -> Path:
    """Rows that are hard to tokenize: brackets, double spaces, quotes, semicolons."""
    arc = [
        {
            "id": str(n),
            "question": f"Which of these  is number {n}?",
            "choices": {"text": ["one", 'two "2"', "a number", "4"], "label": [*labels]},
            "answerKey": labels[n],
        }
        for n, labels in enumerate(("ABCD", "1234", "ABCD"))
    ]
    hellaswag = [
        {
            "activity_label": "Roof removal",
            "ctx_a": "[header] How to [title] Find it.",
            "ctx_b": "he",
            "endings": ["is [step] up.", "goes  down.", "sits.", "is gone [substeps] away."],
            "label": str(n),
        }
        for n in range(2)
    ]
    for task, rows in (("arc_easy", arc), ("arc_challenge", arc[::-1])):
        (folder / f"{task}.validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "hellaswag.validation.2.jsonl").write_text("\n".join(map(json.dumps, hellaswag)))
    mmlu = [
        {
            "question": f" Which star is number {n}? ",
            "subject": ("astronomy", "world_religions")[n % 2],
            "choices": ["one", "two", "three", f"star {n}"],
            "answer": n % 4,
        }
        for n in range(7)
    ]
    for split, rows in (("test", mmlu[:4]), ("dev", mmlu[4:])):
        (folder / f"mmlu.{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with (folder / "TruthfulQA.csv").open("w", newline="") as lines:
        csv.writer(lines).writerows(
            [
                ["Question", "Best Answer", "Correct Answers", "Incorrect Answers"],
                ["Is it?", "It is", "It is; Yes.; it may be", 'No; Never, "not"; No'],
            ]
        )
    return folder


def test_truthfulqa_targets(tmp_path: Path) -> None:
    (row,) = truthfulqa_rows(write_data(tmp_path) / "TruthfulQA.csv")
    wrong = ["No.", 'Never, "not".']
    assert row["question"] == "Is it?"
    assert row["mc1_targets"] == {"choices": ["It is.", *wrong], "labels": [1, 0, 0]}
    right = ["It is.", "Yes.", "it may be."]
    assert row["mc2_targets"] == {"choices": [*right, *wrong], "labels": [1, 1, 1, 0, 0]}
    (tmp_path / "x.csv").write_text("Question,Answer\n")
    with pytest.raises(UserError, match=r"x.csv: no column 'Best Answer'; expected Question"):
        truthfulqa_rows(tmp_path / "x.csv")


@pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}")
def test_truthfulqa_file() -> None:
    rows = truthfulqa_rows(DATA / "TruthfulQA.csv")
    assert len(rows) == 817
    for row in rows:
        for name in ("mc1_targets", "mc2_targets"):
            pairs = list(zip(row[name]["choices"], row[name]["labels"], strict=True))
            # One question has the same answer as a correct and as an incorrect one.
            assert len(set(pairs)) == len(pairs) and {label for _, label in pairs} == {0, 1}
        assert sum(row["mc1_targets"]["labels"]) == row["mc1_targets"]["labels"][0] == 1


@pytest.mark.long
@needs_lm_eval
@pytest.mark.parametrize(("shots", "chat"), [(None, False), (1, True)], ids=["text", "chat"])
def test_scores_of_all_tasks(
    smollm2_dir: Path, tmp_path: Path, shots: int | None, chat: bool
) -> None:
    folder = write_tiny_model_with_tokenizer(
        tmp_path / "model", smollm2_dir, hidden_size=96, max_position_embeddings=512
    )
    local_data = str(write_data(tmp_path))
    config = LMEvalConfig([*TASKS, "mmlu"], None, shots, local_data, chat_template=chat)
    model, tokenizer = load_model(folder, format="none"), hf_tokenizer(str(folder))
    scores, rows = run_tasks(config, load_tasks(config), model, tokenizer, {2}, cpu_world(), 2)
    expected, _ = evaluate(config, load_tasks(config), hf(folder))
    assert [(s.task, s.metric, s.rows) for s in scores] == [
        (s.task, s.metric, s.rows) for s in expected
    ]
    assert [s.value for s in scores] == pytest.approx([s.value for s in expected], abs=1e-5)
    found = {(s.task, s.metric): s for s in scores}
    subjects = {"mmlu_astronomy", "mmlu_world_religions"}
    assert {task for task, _ in found} == {*TASKS, "mmlu", *subjects}
    assert ("hellaswag", "acc_norm") in found
    of_subjects = [found[subject, "acc"].value for subject in subjects]
    assert found["mmlu", "acc"].rows == 4
    assert found["mmlu", "acc"].value == pytest.approx(sum(of_subjects) / 2)
    asked = rows["mmlu_astronomy"][0]["arguments"][0][0]
    assert asked.count("Which star") == 1 + (shots or 0) and "about astronomy." in asked
    assert "number 4?" in asked or not shots  # the first row of dev of this subject
    accuracy = found["arc_easy", "acc"]
    assert accuracy.rows == 3 and accuracy.interval == wilson(round(3 * accuracy.value), 3)
    assert 0 < found["truthfulqa_mc2", "acc"].value < 1
    asked = rows["arc_easy"][0]["arguments"][0][0]
    header = "<|im_end|>\n<|im_start|>assistant\n" if chat else ""
    assert asked.endswith(f"Question: Which of these  is number 0?\nAnswer:{header}")
    assert asked.count("Question:") == 1 + (shots or 0)
    assert asked.count("number 0?") == 1  # the example is another row


@needs_lm_eval
@pytest.mark.parametrize("split", ["validation", "test"])
def test_no_question_is_its_own_example(tmp_path: Path, split: str) -> None:
    data = write_data(tmp_path)
    (data / "arc_easy.validation.jsonl").rename(data / f"arc_easy.{split}.jsonl")
    task = load_tasks(LMEvalConfig(["arc_easy"], None, 2, str(data)))["arc_easy"]
    task.build_all_requests(limit=None, rank=0, world_size=1)
    for request in task.instances:
        assert request.args[0].count("is number") == 3
        assert request.args[0].count(f"is number {request.doc_id}?") == 1
    with pytest.raises(UserError, match="has 3 solved examples .*; expected at most 2, the rows"):
        load_tasks(LMEvalConfig(["arc_easy"], None, 3, str(data)))


@needs_lm_eval
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tasks": ["arc_eazy"]},
            r"^lm_eval.tasks: 'arc_eazy' is not a task of lm-eval; did you mean 'arc_easy'\?$",
        ),
        ({"tasks": ["piqa"]}, r"has no rows of piqa; expected piqa.validation.jsonl$"),
        ({"tasks": ["mmlu"], "local_data": "/nowhere"}, r"/nowhere has no rows of mmlu; expected "),
        ({"local_data": "/nowhere"}, r"^lm_eval.local_data: /nowhere has no rows of arc_easy"),
    ],
    ids=["task", "rows", "subjects", "folder"],
)
def test_faulty_options(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = {"tasks": ["arc_easy"], "local_data": str(write_data(tmp_path)), **changes}
    with pytest.raises(UserError, match=message):
        load_tasks(LMEvalConfig(**config))


@needs_lm_eval
@pytest.mark.slow  # lm-eval's own index takes 5 s or more
def test_names_of_lm_eval_pass() -> None:
    from lm_eval.tasks import TaskManager

    check_tasks(TaskManager().all_tasks)


@needs_lm_eval
def test_the_line_of_a_broken_row_is_named(tmp_path: Path) -> None:
    folder = write_data(tmp_path)
    file = next(folder.glob("arc_easy.*.jsonl"))
    file.write_text(file.read_text() + "{'no': 'json'}\n")
    line = len(file.read_text().splitlines())
    with pytest.raises(UserError, match=rf"{file.name}, line {line}: not valid JSON: "):
        load_tasks(LMEvalConfig(["arc_easy"], local_data=str(folder)))


@needs_lm_eval
def test_how_a_task_asks_for_answers_is_not_left_out_silently(tmp_path: Path, capsys: Any) -> None:
    row = {key: ["a"] for key in ("code_tokens", "docstring_tokens")}
    (tmp_path / "code2text_go.test.jsonl").write_text(json.dumps(row))
    load_tasks(LMEvalConfig(["code2text_go"], local_data=str(tmp_path)))
    assert "'code2text_go' asks for num_beams 10; it is not done" in capsys.readouterr().err


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"is missing; expected pip install lm-eval$"):
        load_tasks(LMEvalConfig(["arc_easy"]))
