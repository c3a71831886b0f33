"""Texts that a tokenizer cannot take are the user's mistake, in one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from qfsdp.common.errors import UserError
from qfsdp.data import encode as module
from qfsdp.data.encode import TooSlow, encode, naming
from qfsdp.data.row_tokenizer import RowTokenizer, one_by_one
from qfsdp.evaluation.perplexity import TextConfig, text_windows


def tokenizer(pattern: str | None = None) -> Tokenizer:
    found = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    if pattern is not None:
        splitter: Any = pre_tokenizers.Split(Regex(pattern), "isolated")
        found.pre_tokenizer = splitter
    return found


@pytest.mark.parametrize("text", ["ab\ud800", "ab\udfffa", "ab\udc80\ud83d"])
def test_half_of_a_surrogate_pair(text: str) -> None:
    with pytest.raises(UserError, match="at character 3, half of a surrogate pair; expected"):
        encode(tokenizer(), text)


def test_a_panic_is_one_line() -> None:
    text = "a" * 40 + "b"
    with pytest.raises(UserError, match="^tokenizer.json fails on a text of 41 char.*retry-limit"):
        encode(tokenizer("(a+)+$"), text)
    assert encode(tokenizer(), text).ids == [0] * 40 + [1]


def test_a_long_text_is_the_same() -> None:
    text = "abaab" * 4096
    assert encode(tokenizer(), text).ids == tokenizer().encode(text).ids
    with pytest.raises(UserError, match="at character 20481, half of a surrogate pair"):
        encode(tokenizer(), text + "\ud800")
    with pytest.raises(UserError, match="^tokenizer.json fails on a text of 5,?000 char"):
        encode(tokenizer("(a+)+$"), "a" * 4999 + "b")


class Stuck:
    """A tokenizer that never ends with texts of the letter b."""

    def __init__(self) -> None:
        self.ended, self.texts = threading.Event(), 0

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.texts += 1
        while "b" in texts[0] and not self.ended.wait(60):
            pass
        return [tokenizer().encode(texts[0][:1])]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Stuck()
    monkeypatch.setattr(module, "SLOW_S", 0.01)
    monkeypatch.setattr(module, "LIMIT_S", 0.02)
    monkeypatch.setattr(module, "SLOWEST_PER_S", 10**9)
    yield found
    found.ended.set()


def test_a_text_without_end(stuck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "say", said.append)
    wrong = pytest.raises(
        TooSlow, match="needs over 0 s for a text of 9,000 characters that begins"
    )
    with wrong, naming("prompt 3 of 7"):
        encode(stuck, "b" * 9000)
    line = "tokenizing prompt 3 of 7, a text of 9,000 characters that begins with 'bbbbbbbb"
    assert said[0].startswith(line)


def test_a_short_text_without_end(stuck: Any) -> None:
    """Thousands of patterns that look ahead need minutes for 2,000 letters."""
    for _ in range(2):
        with pytest.raises(TooSlow, match="needs over 0 s for a text of 3 characters"):
            encode(stuck, "bbb")
    assert encode(stuck, "aaa").ids == [0]  # by another thread


def test_a_fork_encodes() -> None:
    """It has none of its parent's threads."""
    assert encode(tokenizer(), "ab").ids == [0, 1]
    child = os.fork()
    if child == 0:
        os._exit(0 if encode(tokenizer(), "ab").ids == [0, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_its_row_is_named(stuck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "say", said.append)

    def samples_of(row: Any) -> Any:
        yield encode(stuck, f"<s>{row['text']}").ids, [0]

    rows: list[Any] = [{"text": letter * 9000} for letter in "abbb"]
    with pytest.raises(UserError, match="dataset.source: rows.jsonl, row 2: .*needs over 0 s"):
        RowTokenizer("rows.jsonl", one_by_one(samples_of), None)(rows, 0, 4)
    assert said[0].startswith("tokenizing dataset.source: rows.jsonl, row 2, a text of 9,003 char")
    assert stuck.texts == 2  # the rest is not tried: it may be as slow


def test_the_file_of_a_perplexity_is_named(tmp_path: Path) -> None:
    class Panics:
        bos_id = None

        def encode(self, text: str, **_: bool) -> list[int]:
            return encode(tokenizer("(a+)+$"), text).ids

    file = tmp_path / "text.txt"
    file.write_text("a" * 40 + "b")
    with pytest.raises(UserError, match=r"^text.x.file: '.*/text.txt': tokenizer.json fails on a"):
        text_windows("text.x", TextConfig(str(file)), Panics())
