"""Modelfiles of Ollama: their Go templates write what transformers writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from qfsdp.data import HFTokenizer, hf_tokenizer
from qfsdp.data.chat.ollama import go_template, modelfile
from tests.data.chat_families import FAMILIES
from tests.data.test_tokenizer import byte_level, write_folder

CHATS = [
    [("user", "Hi")],
    [("user", "Hi"), ("assistant", "Yes?"), ("user", "2 + 3?")],
    [("system", "Be brief."), ("user", "Hi")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "2 + 3?")],
]
NOT_IN_GO = {"gemma3", "mistral"}  # the system message goes into a question


def go(text: str, chat: list[tuple[str, str]]) -> str:
    """What Ollama makes of the TEMPLATE and SYSTEM of a Modelfile."""
    template = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    system = re.search(r'SYSTEM """(.*?)"""', text, re.DOTALL)
    assert template is not None
    loop = re.fullmatch(
        r"(.*)\{\{ range .Messages \}\}\{\{ (.*)end \}\}\{\{ end \}\}(.*)", template[1], re.DOTALL
    )
    assert loop is not None
    case = re.compile(
        r'if eq .Role "(\w+)" \}\}(.*?)\{\{ .Content \}\}(.*?)\{\{ (?:else )?', re.DOTALL
    )
    around = {role: (before, after) for role, before, after in case.findall(loop[2])}
    if system is not None and chat[0][0] != "system":
        chat = [("system", system[1]), *chat]
    return loop[1] + "".join(content.join(around[role]) for role, content in chat) + loop[3]


def family(name: str, folder: Path) -> HFTokenizer:
    write_folder(folder, byte_level(), chat_template=FAMILIES[name])
    return hf_tokenizer(str(folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_families(name: str, tmp_path: Path) -> None:
    tokenizer = family(name, tmp_path)
    if name in NOT_IN_GO:
        assert go_template(tokenizer, False) is None
        assert "TEMPLATE" not in modelfile("x-Q8_0.gguf", tokenizer, False, {0})
        return
    text = modelfile("My x-Q8_0.gguf", tokenizer, False, {tokenizer.eos_id})
    assert text.startswith("# ollama create my-x-q8_0 -f 'My x-Q8_0.Modelfile'\n")
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    assert "FROM ./My x-Q8_0.gguf" in text and f'PARAMETER stop "{eos}"' in text
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        try:
            expected = oracle.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # the template has no system messages
            assert chat[0][0] == "system"
            continue
        assert go(text, chat) == expected


def test_llama_cpp_puts_the_first_token(tmp_path: Path) -> None:
    tokenizer = family("llama3", tmp_path)
    assert tokenizer.bos_id is not None
    bos = tokenizer.decode([tokenizer.bos_id], skip_special_tokens=False)
    with_bos = modelfile("x.gguf", tokenizer, False, set())
    without = modelfile("x.gguf", tokenizer, True, set())
    assert go(with_bos, CHATS[0]) == bos + go(without, CHATS[0])
