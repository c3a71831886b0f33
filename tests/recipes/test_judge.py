"""Judging: verdicts are read strictly, counted once, and a run goes on where it was."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from qfsdp.examples.judge.exchanges import answer_text
from qfsdp.examples.judge.questions import generated_questions, read_questions
from qfsdp.examples.judge.verdicts import Games, Ratings, rating, winner

from qfsdp.checkpoint.lock import FolderLock
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.evaluation.intervals import mean_interval
from tests.evaluation.test_serving import Server
from tests.tiny import ROOT, load_recipe, write_tiny_model_with_tokenizer

pytest.importorskip("openai")

ROWS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "math", "turns": ["2 + 2?"], "reference": ["4"]},
    {"question_id": 2, "category": "writing", "turns": ["Write.", "Shorter."]},
    {"question_id": 3, "turns": ["Why?"]},
]


class Endpoint:
    """An endpoint with OpenAI's API whose answers are those of a function of the model's name and
    the messages. Afterwards `asked` has all requests."""

    def __init__(self, answer: Callable[[str, list[dict[str, str]]], str]) -> None:
        self.asked: list[str] = []
        self.fields: list[dict[str, Any]] = []  # of the requests, without their messages
        self.raw: tuple[str, bytes] | None = None  # content type and bytes of every answer
        self.drips = False  # answers a byte in 0.05 s, without end
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                given = json.loads(body)
                endpoint.asked.append(json.dumps([given["model"], given["messages"]]))
                endpoint.fields.append({k: v for k, v in given.items() if k != "messages"})
                if endpoint.drips:
                    return self.drip()
                text = answer(given["model"], given["messages"])
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                found = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
                data = json.dumps(found | {"choices": [choice]}).encode()
                kind, data = endpoint.raw or ("application/json", data)
                self.send_response(400 if text == "refuse" else 200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def drip(self) -> None:
                self.send_response(200)
                self.end_headers()
                with suppress(ConnectionError):
                    while endpoint.drips:
                        self.wfile.write(b" ")
                        time.sleep(0.05)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answers(model: str, messages: list[dict[str, str]]) -> str:
    """The candidate "good" says more; the judge likes the longer answer, and in writing the first
    one; about the last question it does not decide."""
    text = messages[-1]["content"]
    if model != "judge":
        return "It is 4, I think." if model == "good" else "Four."
    system = messages[0]["content"]
    if "rate the last answer" in system:
        return "Good. Rating: [[8]]" if "I think" in text else "Hm. Rating: [[4]]"
    if "Why?" in text:
        return "[[A]] or [[B]]?"
    if "Write." in text:
        return "[[A]]"
    first, _, _ = text.partition("<conversation with assistant B>")
    return "So [[A]]." if "I think" in first else "So [[B]]."


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint(answers)
    yield found
    found.close()


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("judge")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def config(recipe: ModuleType, url: str, folder: Path, *more: str) -> Any:
    words = ["--config", str(ROOT / "configs/judge.yaml"), f"output_dir={folder}"]
    words += [f"judge.url={url}", "judge.model=judge", "~candidates.tuned", "in_flight=3"]
    words += [f"candidates.good.url={url}", "candidates.good.model=good"]
    words += [f"candidates.base.url={url}", "candidates.base.model=bad"]
    return load_config(recipe.Config, [*words, *more])


def judge(recipe: ModuleType, cfg: Any, folder: Path) -> dict[str, Any]:
    recipe.check(cfg)
    recipe.main(cfg)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_scores_and_win_rates(
    recipe: ModuleType, endpoint: Endpoint, questions: Path, tmp_path: Path, capsys: Any
) -> None:
    cfg = config(recipe, endpoint.url, tmp_path / "run", f"questions={questions}")
    found = judge(recipe, cfg, tmp_path / "run")
    assert found["ratings"]["good"]["mean"] == 8 and found["ratings"]["base"]["mean"] == 4
    games = found["games"]["good"]
    # Question 1: a win. Question 2: two turns whose verdict depends on the order.
    counts = {"wins": 1, "losses": 0, "ties": 0, "contradictions": 2, "no_verdict": 2}
    assert {key: games[key] for key in counts} == counts
    assert games["win_rate"] == 0.75 and games["questions"] == 2
    assert games["interval"] == list(mean_interval([1.0, 0.5]))
    assert games["win_rate_by_place"] == {"first": 1.0, "second": pytest.approx(1 / 3)}
    # 2 candidates x 4 turns, 8 ratings, 4 turns x 2 orders; each once.
    assert len(endpoint.asked) == len(set(endpoint.asked)) == 24
    printed = capsys.readouterr().out
    assert "good against base: wins 75.0%" in printed and "2 contradictions" in printed
    lines = (tmp_path / "run/exchanges.jsonl").read_text().splitlines()
    assert len(lines) == 24
    assert any("### Reference answer:\\n4" in line for line in lines)


def test_a_run_goes_on(
    recipe: ModuleType, endpoint: Endpoint, questions: Path, tmp_path: Path
) -> None:
    """After an endpoint that fails in the middle, and after a line that a kill has cut."""
    given = f"questions={questions}"
    whole = judge(recipe, config(recipe, endpoint.url, tmp_path / "a", given), tmp_path / "a")
    left = [9]

    def tired(model: str, messages: list[dict[str, str]]) -> str:
        left[0] -= 1
        return "refuse" if left[0] < 0 else answers(model, messages)

    other, folder = Endpoint(tired), tmp_path / "run"
    cfg = config(recipe, other.url, folder, given, "in_flight=1")
    recipe.check(cfg)
    with pytest.raises(UserError, match=r"^(judge|candidates\.\w+): http.* answers 400: "):
        recipe.main(cfg)
    file = folder / "exchanges.jsonl"
    assert len(file.read_text().splitlines()) == 9
    with file.open("a") as stream:
        stream.write('{"key": "cut')
    answered, other.asked, left[0] = other.asked[:9], [], 1000
    assert judge(recipe, cfg, folder) == whole
    assert sorted(answered + other.asked) == sorted(endpoint.asked)
    other.asked = []
    assert judge(recipe, cfg, folder) == whole and other.asked == []
    other.close()


def test_verdicts_are_read_strictly() -> None:
    for text, expected in (
        ("Rating: [[5]]", 5.0),
        ("[[7.5]] ... so [[7.5]]", 7.5),
        ("Rating: 5", None),
        ("[[5]] or [[6]]", None),
        ("[[11]]", None),
        ("[[0]]", None),
        ("[[five]]", None),
        ("<think>[[4]]? No.</think>\nRating: [[7]]", 7.0),
        ("<think>[[4]]", 4.0),
        ("", None),
    ):
        assert rating(text) == expected, text
    for text, verdict in (
        ("[[A]]", "first"),
        ("I say [[B]], yes, [[B]]", "second"),
        ("[[C]]", "tie"),
        ("[[A]] or [[B]]", None),
        ("A is better", None),
        ("[[D]]", None),
        ("<think>Is it [[A]]?</think> [[B]]", "second"),
    ):
        assert winner(text) == verdict, text


def test_what_is_counted() -> None:
    games = Games()
    for question, pair in (
        ("a", ("first", "second")),
        ("a", ("second", "first")),
        ("b", ("tie", "tie")),
        ("c", ("first", "first")),
        ("d", ("first", None)),
    ):
        games.add(question, *pair)  # type: ignore[arg-type]
    assert (games.wins, games.losses, games.ties, games.contradictions) == (1, 1, 1, 1)
    assert games.no_verdict == 1 and games.points == {"a": [1.0, 0.0], "b": [0.5], "c": [0.5]}
    assert games.rate() == (0.5, mean_interval([0.5, 0.5, 0.5]))
    assert Games().rate() == Ratings().score() == (None, None)


def test_questions(tmp_path: Path, questions: Path) -> None:
    read = read_questions("questions", str(questions))
    assert [q.id for q in read] == ["1", "2", "3"] and read[0].references == ("4",)
    made = generated_questions()
    assert len({question.turns[0] for question in made}) == len(made) == 40
    for question in made:
        if question.references:
            product = re.match(r"(\d+) \* (\d+) - (\d+) = (-?\d+)", question.references[0])
            assert product is not None
            a, b, c, left = map(int, product.groups())
            assert a * b - c == left and left > 0
    for row, message in (
        ({"question_id": 1, "turns": "a"}, "turns: 'a'; expected a list of texts"),
        ({"question_id": 1, "turns": []}, "0 turns"),
        ({"question_id": 1, "turns": ["a"], "reference": ["b", "c"]}, "1 turns, 2 references"),
        ({"turns": ["a"]}, "no column 'question_id'"),
    ):
        questions.write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=message):
            read_questions("questions", str(questions))
    questions.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[0]) + "\n")
    with pytest.raises(UserError, match="question_id 1 twice"):
        read_questions("questions", str(questions))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("baseline=none", "baseline: 'none' is not valid; expected a candidate"),
        ("judge.url=localhost", "judge.url: 'localhost' is not valid; .* http"),
        ("in_flight=0", "in_flight: 0 is not valid"),
        ("judge.options.max_tokens=5", "judge.options.max_tokens: 5 is not valid; .* no own key"),
        ("candidates={}", "candidates: {} is not valid; expected at least one"),
        ("questions=nowhere", "questions: 'nowhere': No such file"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(
    word: str, message: str, recipe: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        recipe.check(config(recipe, "http://127.0.0.1:9/v1", tmp_path / "run", word))


def test_fields_for_models_that_reason(
    recipe: ModuleType, endpoint: Endpoint, questions: Path, tmp_path: Path
) -> None:
    """They refuse max_tokens and any temperature; all others get what they got before."""
    words = ["judge.max_tokens=null", "judge.temperature=null", f"questions={questions}"]
    words += ["judge.options={max_completion_tokens: 64, reasoning_effort: low}"]
    folder = tmp_path / "run"
    judge(recipe, config(recipe, endpoint.url, folder, *words), folder)
    fields = {given["model"]: given for given in endpoint.fields}
    more = {"max_completion_tokens": 64, "reasoning_effort": "low"}
    assert fields["judge"] == {"model": "judge", **more}
    assert fields["good"] == {"model": "good", "max_tokens": 512, "temperature": 0.0}
    asked = len(endpoint.fields)
    judge(recipe, config(recipe, endpoint.url, folder, *words), folder)
    assert len(endpoint.fields) == asked  # the same requests: nothing is asked twice


def test_an_endpoint_that_is_not_there(recipe: ModuleType, tmp_path: Path) -> None:
    cfg = config(recipe, "http://127.0.0.1:9/v1", tmp_path / "run", "max_questions=1")
    recipe.check(cfg)
    with pytest.raises(UserError, match=r"candidates\.\w+\.url: http.* cannot be reached"):
        recipe.main(cfg)


NULL = b'{"choices": [{"finish_reason": "stop", "message": {"content": null}}]}'
NO_ANSWERS: list[tuple[bytes, str]] = [
    (b"<html>\x1b[31mBad gateway", r"answers b'<html>\\x1b\[31mBad gateway' \(no JSON\)"),
    (b"", r"answers b'' \(no JSON\)"),
    (b'{"choices": [', r"answers .* \(no JSON\)"),
    (b"[" * 9999, r"\(no JSON\)"),
    (b"\xff\xfe\xfd", r"\(no JSON\)"),
    (b"null", r"\(no object\)"),
    (b'{"error": "busy"}', r"\(no choices\)"),
    (b'{"choices": []}', r"\(no choices\)"),
    (b'{"choices": [null]}', r"\(no choices\)"),
    (b'{"choices": [{"message": null}]}', r"\(no message\)"),
    (b'{"choices": [{"text": "a"}]}', r"\(no message\)"),
    (b'{"choices": [{"message": {"content": [1]}}]}', r"\(a message without text\)"),
    (NULL, r"\(a message without text\)"),
]


@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_what_is_no_answer_is_not_kept(
    kind: str, recipe: ModuleType, questions: Path, tmp_path: Path
) -> None:
    """One line that says what came; the same command goes on when the endpoint is repaired."""
    endpoint, folder = Endpoint(answers), tmp_path / "run"
    words = [f"questions={questions}", "in_flight=1"]
    cfg = config(recipe, endpoint.url, folder, *words)
    recipe.check(cfg)
    for data, message in NO_ANSWERS:
        endpoint.raw = (kind, data)
        with pytest.raises(UserError, match=message) as caught:
            recipe.main(cfg)
        assert re.match(r"(judge|candidates\.\w+): http\S+ answers", str(caught.value))
        assert "\n" not in str(caught.value) and not (folder / "exchanges.jsonl").exists()
    endpoint.raw, endpoint.asked = None, []
    whole = judge(recipe, cfg, folder)
    asked = list(endpoint.asked)
    # An earlier version kept null messages: they are asked again, and nothing else.
    file = folder / "exchanges.jsonl"
    lines = file.read_text().splitlines()
    broken = json.loads(lines[5]) | {"response": json.loads(NULL)}
    file.write_text("\n".join([*lines[:5], json.dumps(broken), *lines[6:], ""]))
    assert judge(recipe, cfg, folder) == whole and len(endpoint.asked) == len(asked) + 1
    endpoint.close()


def test_texts_of_answers() -> None:
    for content, more, text in (
        ("a\ud800b", {}, "a?b"),
        (None, {"refusal": "No."}, ""),
        ("", {}, ""),
    ):
        message = {"content": content, **more}
        assert answer_text({"choices": [{"message": message}]}) == text
    assert answer_text({"choices": [{"message": {}, "finish_reason": "length"}]}) == ""


def test_an_answer_that_drips(recipe: ModuleType, questions: Path, tmp_path: Path) -> None:
    """The limit is for the whole answer: every read is in time, and the last byte never comes."""
    endpoint = Endpoint(answers)
    endpoint.drips = True
    words = [f"questions={questions}", "request_timeout=0.3"]
    cfg = config(recipe, endpoint.url, tmp_path / "run", *words)
    recipe.check(cfg)
    with pytest.raises(UserError, match=r"gives no whole answer within 0.3 s"):
        recipe.main(cfg)
    endpoint.drips = False
    endpoint.close()


def test_two_runs_in_one_folder(
    recipe: ModuleType, endpoint: Endpoint, questions: Path, tmp_path: Path
) -> None:
    cfg = config(recipe, endpoint.url, tmp_path / "run", f"questions={questions}")
    recipe.check(cfg)
    with (
        FolderLock(tmp_path / "run", "output_dir"),
        pytest.raises(UserError, match=r"output_dir: .*is being written by process \d+"),
    ):
        recipe.main(cfg)
    assert endpoint.asked == []
    assert judge(recipe, cfg, tmp_path / "run")["ratings"]["good"]["mean"] == 8


@pytest.mark.long
def test_our_own_server(
    recipe: ModuleType, smollm2_dir: Path, tmp_path: Path, questions: Path
) -> None:
    """A random model gives no verdict; every answer is kept, and none is asked for twice."""
    model = write_tiny_model_with_tokenizer(
        tmp_path / "model", smollm2_dir, max_position_embeddings=2048
    )
    server = Server(f"model.path={model}", "model_name=m", QFSDP_EAGER_KERNELS="1")
    try:
        more = [f"questions={questions}", "max_questions=1", "judge.max_tokens=4"]
        more += [f"{key}.model=m" for key in ("judge", "candidates.base", "candidates.good")]
        more += [f"candidates.{name}.max_tokens=4" for name in ("base", "good")]
        url = f"http://127.0.0.1:{server.port}/v1"
        found = judge(recipe, config(recipe, url, tmp_path / "run", *more), tmp_path / "run")
    finally:
        server.end()
    assert found["ratings"]["base"]["no_verdict"] == 1
    assert found["games"]["good"]["no_verdict"] == 2
    assert found["games"]["good"]["win_rate"] is None
