"""Prompts to tokens, the tokens that end an answer, and generated tokens to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from qfsdp.common.errors import UserError
from qfsdp.data import hf_tokenizer
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
def test_chats_have_the_tokens_of_transformers(template: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=template)
    tokenizer = hf_tokenizer(str(folder))
    for messages in (QUESTION, CHAT[:4]):
        expected = oracle_ids(folder, messages, add_generation_prompt=True)
        assert chat_tokens(tokenizer, messages) == expected
    with_system = prompt_tokens(tokenizer, CHAT[1]["content"], True, CHAT[0]["content"])
    assert with_system == oracle_ids(folder, CHAT[:2], add_generation_prompt=True)
    text = prompt_tokens(tokenizer, "What is", False, None)
    assert tokenizer.decode(text) == "What is"


@pytest.mark.parametrize(
    ("turn", "header"),
    [
        ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"),
        ("{{ m.role }}: {{ m.content }}\n", "assistant:"),
        (
            "{{ '[INST]' if m.role == 'user' }} {{ m.content }}{{ '[/INST]' if m.role == 'user' }}",
            "",
        ),
    ],
)
def test_a_template_that_asks_for_no_answer(turn: str, header: str, tmp_path: Path) -> None:
    """A prompt ends with what training has before an answer: or `assistant` is in its text."""
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, byte_level(), chat_template=template)))
    asked, answer = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "No"}
    before = tokenizer.render([*asked, answer]).rpartition("No")[0]
    assert tokenizer.render(asked, True) == before.rstrip(" ") and before.rstrip(" ").endswith(
        header
    )
    assert chat_tokens(tokenizer, asked) == tokenizer.encode(before.rstrip(" "), False, False)


@pytest.mark.parametrize("build", [sentencepiece_tokenizer, tiktoken_tokenizer])
def test_torchtunes_tokenizers_ask_for_an_answer(build: Any, tmp_path: Path) -> None:
    tokenizer = build(tmp_path)
    tokens = chat_tokens(tokenizer, QUESTION)
    assert "17 + 25?" in tokenizer.decode(tokens) and tokens[0] == tokenizer.bos_id
    assert tokens[-1] not in tokenizer.stop_tokens  # the prompt does not end the answer
    if build is tiktoken_tokenizer:
        header = [tokenizer.end_header_id, *tokenizer.encode("\n\n", add_bos=False, add_eos=False)]
        assert tokens[-3:] == header
    assert stop_ids(tokenizer, tmp_path) == set(tokenizer.stop_tokens)


@pytest.mark.parametrize(
    ("prompt", "chat_template", "system_prompt", "words"),
    [
        (QUESTION, False, None, "chat_template=true"),
        (CHAT, True, None, "the last message is the assistant's"),
        (CHAT[:2], True, "Be long.", "system_prompt; expected only one of them"),
        ([], True, None, "expected a text, or a list"),
        (17, True, None, "expected a text, or a list"),
        ([{"content": "?"}], True, None, "expected a text, or a list"),
    ],
)
def test_faulty_prompts(
    prompt: Any, chat_template: bool, system_prompt: str | None, words: str, tmp_path: Path
) -> None:
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, byte_level(), chat_template=CHATML)))
    with pytest.raises(UserError, match=words):
        prompt_tokens(tokenizer, prompt, chat_template, system_prompt)


def test_stop_ids_come_from_all_files(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="config.json: not readable; expected a JSON object"):
        stop_ids(plain, folder)
    for ids in ([[1]], "</s>", {"id": 1}):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(UserError, match="config.json: eos_token_id: .*; expected ids of tok"):
            stop_ids(plain, folder)


@pytest.mark.parametrize("backend", [byte_level, llama2_like])
def test_stream_gives_whole_characters(backend: Any, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, backend())))
    text = "  Zażółć 🙂👩‍🚀 你好, yes i s\n  quite\tsure 🙂"
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids) and stream.end() == ""
    assert pieces.count("") > 5 and not any("\ufffd" in piece for piece in pieces)


def test_stream_keeps_a_space_after_a_special_token(tmp_path: Path) -> None:
    backend = llama2_like()
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]  # as Llama 2
    backend.decoder = decoders.Sequence(steps)
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, backend)))
    text, special = (tokenizer.encode(one, False, False) for one in ("yes", "</s>"))
    for ids in ([*text, *special, *text], [*special, *text, *special, *special, *text]):
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, ids)) == tokenizer.decode(ids)


def test_stream_gives_an_incomplete_character_at_its_end(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, byte_level())))
    first = tokenizer.encode("🙂", add_bos=False, add_eos=False)[:1]
    ids = [*tokenizer.encode("ab", add_bos=False, add_eos=False), *first]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) == "ab" and stream.end() == "\ufffd"
    stream = TextStream(tokenizer)  # and before the next character
    assert "".join(map(stream.push, [*first, *ids[:2]])) == "\ufffdab"
