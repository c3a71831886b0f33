"""Prompts as tokens, the tokens that end an answer, and text that comes in whole characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qfsdp.cli.errors import UserError
from qfsdp.data import hf_tokenizer
from qfsdp.data.json_lines import read_rows
from qfsdp.evaluation.prompts import chat_tokens, prompt_tokens, stop_ids
from qfsdp.evaluation.text_stream import TextStream
from tests.data.test_conversations import sentencepiece_tokenizer, tiktoken_tokenizer
from tests.data.test_tokenizer import (
    CHAT,
    CHATML,
    LLAMA2,
    LLAMA3,
    byte_level,
    llama2_like,
    oracle_ids,
    write_folder,
)

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2])
def test_chats_are_rendered_as_transformers_does(template: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=template)
    tokenizer = hf_tokenizer(str(folder))
    for messages in (QUESTION, CHAT[:4]):
        expected = oracle_ids(folder, messages, add_generation_prompt=True)
        assert chat_tokens(tokenizer, messages) == expected
    with_system = prompt_tokens(tokenizer, CHAT[1]["content"], True, CHAT[0]["content"])
    assert with_system == oracle_ids(folder, CHAT[:2], add_generation_prompt=True)
    text = prompt_tokens(tokenizer, "What is", False, None)
    assert text[0] == tokenizer.bos_id and tokenizer.decode(text[1:]) == "What is"


@pytest.mark.parametrize("build", [sentencepiece_tokenizer, tiktoken_tokenizer])
def test_torchtunes_tokenizers_ask_for_an_answer(build: Any, tmp_path: Path) -> None:
    tokenizer = build(tmp_path)
    tokens = chat_tokens(tokenizer, QUESTION)
    assert "17 + 25?" in tokenizer.decode(tokens) and tokens[0] == tokenizer.bos_id
    assert tokens[-1] not in tokenizer.stop_tokens  # the answer has not ended before it began
    if build is tiktoken_tokenizer:
        header = [tokenizer.end_header_id, *tokenizer.encode("\n\n", add_bos=False, add_eos=False)]
        assert tokens[-3:] == header
    assert stop_ids(tokenizer, tmp_path) == set(tokenizer.stop_tokens)


@pytest.mark.parametrize(
    ("prompt", "chat_template", "system_prompt", "words"),
    [
        (QUESTION, False, None, "chat_template=true"),
        (CHAT, True, None, "the last message is the assistant's"),
        (CHAT[:2], True, "Be long.", "system_prompt; give one"),
        ([], True, None, "expected a text, or a list"),
        (17, True, None, "expected a text, or a list"),
        ([{"content": "?"}], True, None, "expected a text, or a list"),
    ],
)
def test_what_is_no_prompt(
    prompt: Any, chat_template: bool, system_prompt: str | None, words: str, tmp_path: Path
) -> None:
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, byte_level(), chat_template=CHATML)))
    with pytest.raises(UserError, match=words):
        prompt_tokens(tokenizer, prompt, chat_template, system_prompt)


def test_answers_end_where_any_file_says(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=LLAMA3)
    tokenizer = hf_tokenizer(str(folder))
    end_of_turn = tokenizer.special_tokens["<|eot_id|>"]
    assert stop_ids(tokenizer, folder) == {tokenizer.eos_id, end_of_turn}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 301}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [301, 302]}))
    assert stop_ids(tokenizer, folder) == {tokenizer.eos_id, end_of_turn, 301, 302}
    (folder / "generation_config.json").write_text("{}")
    plain = hf_tokenizer(str(write_folder(tmp_path, byte_level())))
    assert stop_ids(plain, folder) == {plain.eos_id, 301}
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match="generation_config.json: not a JSON object"):
        stop_ids(plain, folder)


@pytest.mark.parametrize("backend", [byte_level, llama2_like])
def test_text_comes_in_whole_characters(backend: Any, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, backend())))
    text = "  Zażółć 🙂👩‍🚀 你好, yes i s\n  quite\tsure 🙂"
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids) and stream.end() == ""
    assert pieces.count("") > 5 and not any("\ufffd" in piece for piece in pieces)


def test_a_broken_character_is_told_in_the_end(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, byte_level())))
    first = tokenizer.encode("🙂", add_bos=False, add_eos=False)[:1]
    ids = [*tokenizer.encode("ab", add_bos=False, add_eos=False), *first]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) == "ab" and stream.end() == "\ufffd"
    stream = TextStream(tokenizer)  # and before a character that is none of its own
    assert "".join(map(stream.push, [*first, *ids[:2]])) == "\ufffdab"


def test_rows_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "Żółć?", "id": 1}\n\n{"q": "b\\u2028"}\n', encoding="utf-8")
    assert read_rows("prompts", file, "q") == [{"q": "Żółć?", "id": 1}, {"q": "b\u2028"}]
    with pytest.raises(UserError, match=r"rows.jsonl, line 1: no column 'p'; .* q, id$"):
        read_rows("prompts", file, "p")
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: no column 'id'; .* q$"):
        read_rows("prompts", file, "id")
    file.write_text('{"q": 1}\n{"q": \n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: not valid JSON"):
        read_rows("prompts", file, "q")
    file.write_text("[1]\n")
    with pytest.raises(UserError, match="line 1: no column 'q'; its columns are none"):
        read_rows("prompts", file, "q")
    file.write_text("\n")
    with pytest.raises(UserError, match="^prompts: .* has no rows"):
        read_rows("prompts", file, "q")
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="^prompts: .*; expected a .jsonl file"):
            read_rows("prompts", path, "q")
