"""Texts that a tokenizer cannot take are the user's mistake, in one line."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from qfsdp.cli.errors import UserError
from qfsdp.data.encode import encode


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
