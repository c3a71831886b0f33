"""What is trained, for templates in the form of many families: as transformers' marks say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qfsdp.common.errors import UserError
from qfsdp.data import HFTokenizer, chat_dataset, hf_tokenizer
from qfsdp.data.chat.chat_template import ChatTemplate
from qfsdp.evaluation.prompts import chat_tokens, stop_ids
from tests.data.chat_families import EOS, FAMILIES, MACRO, SPECIALS, unmarked
from tests.data.test_tokenizer import trained_texts, write_folder
from tests.data.tool_templates import call


def bytes_only() -> Tokenizer:
    """A token for each byte, and the special tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def family(folder: Path, name: str, template: str | None = None) -> HFTokenizer:
    """A tokenizer with the template of a family, or with another one."""
    backend = bytes_only()
    eos = EOS.get(name, "</s>")
    write_folder(folder, backend, chat_template=template or FAMILIES[name], eos_token=eos)
    return hf_tokenizer(str(folder))


def said(*roles_and_texts: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[word[0]], "content": word[2:]} for word in roles_and_texts]


def calling(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(name, city="Rome")], **more}


QUESTION, ANSWER = said("u:a", "a:b")
CHATS = {
    "one turn": said("u:a", "a:b"),
    "two turns": said("u:a", "a:b", "u:c", "a:d"),
    "system": said("s:Be short.", "u:a?", "a:b\n b", "u: c ", "a:d"),
    "five turns": said(*[f"{who}:{who} {i}" for i in range(5) for who in "ua"]),
    "answer first": said("a:hello", "u:a", "a:b"),
    "two answers": said("u:a", "a:hello", "a:b", "u:c", "a:d"),
    "developer": said("d:Answer in French.", "u:a", "a:b"),
    "tools": [*said("u:Weather?"), calling(), *said("t:18 \"degrees\"", "a:It is 18.")],
    "call": [*said("u:Weather?"), calling()],
    "reasoning": [QUESTION, ANSWER | {"reasoning_content": "since x"}],
    "thinking": [QUESTION, ANSWER | {"reasoning": "since x"}],
    "in text": said("u:a", "a:<think>\nsince x\n</think>\n\nb"),
    "earlier reasoning": [QUESTION, ANSWER | {"reasoning_content": "x"}, *said("u:c", "a:d")],
    "odd": said("u:<think>", "a:<b>bold</b>", "u:assistant", "a:### Assistant: 1"),
}  # fmt: skip


def theirs(folder: Path, chat: Any, **options: Any) -> tuple[list[int], list[bool]]:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    return list(found["input_ids"]), [bool(flag) for flag in found["assistant_masks"]]


def parts(chat: Any) -> list[str]:
    """All that a message says."""
    texts = []
    for message in chat:
        content = message["content"].replace("<think>", "").split("</think>")
        texts += [*content, message.get("reasoning_content", ""), message.get("reasoning", "")]
        texts += ["weather"] * ("tool_calls" in message)
    return [text.strip() for text in texts if text.strip()]


@pytest.mark.parametrize("name", FAMILIES)
def test_spans_of_generation_marks(tmp_path: Path, name: str) -> None:
    """The marks of transformers, with the marked template and without; nothing is left out."""
    trained = 0
    for kind, chat in CHATS.items():
        marked = family(tmp_path, name)
        as_system = not marked._chats.form.knows_developer
        seen = [m | {"role": "system"} if as_system and m["role"] == "developer" else m
                for m in chat]  # fmt: skip
        try:
            ids, flags = theirs(tmp_path, seen)
        except Exception:  # the template refuses the conversation
            with pytest.raises(UserError):
                marked.tokenize_messages(chat)
            continue
        bare = family(tmp_path, name, unmarked(FAMILIES[name]))
        text = marked.decode(ids, False)
        if not all(part in text or json.dumps(part)[1:-1] in text for part in parts(chat)):
            for tokenizer in (marked, bare):
                with pytest.raises(UserError, match=r"leaves out .* of message \d of \d \("):
                    tokenizer.tokenize_messages(chat)
            continue
        for tokenizer in (marked, bare):
            tokens, mask = tokenizer.tokenize_messages(chat)
            # The token that begins the next turn ends an answer; after the last one it is added.
            called = (
                tokenizer.special_tokens["<|observation|>"] if "tool_calls" in chat[-1] else None
            )
            added = [called or tokenizer.end_of_turn_id] if name == "glm" else []
            assert tokens == ids + added, kind
            shown = trained_texts(tokenizer, tokens, mask)
            assert [not masked for masked in mask] == flags + [True] * len(added), (kind, shown)
            trained += 1
    assert trained >= 12


LEARNT = {
    "glm": ["\nb<|user|>", "\nd<|user|>"],
    "smollm2": ["b<|im_end|>", "d<|im_end|>"],
    "phi3": ["b<|end|>", "d<|end|>"],
    "qwen3": ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"],
    "qwen3.5": ["b<|im_end|>", "\n</think>\n\nd<|im_end|>"],
    "r1": ["b<｜end▁of▁sentence｜>", "d<｜end▁of▁sentence｜>"],
    "gpt-oss": ["<|channel|>final<|message|>b<|end|>", "<|channel|>final<|message|>d<|return|>"],
}
REMARKS = {
    "gpt-oss": "ends an answer with '<|end|>', at which generation does not stop; expected it among"
    " eos_token_id of generation_config.json, dataset.train_on_last_turn_only=true, or another tok",
    "no-end": "ends an answer with no special token, so the model does not learn to stop; expected "
    "tokenizer.chat_template with one after answers",
    "eos-once": "ends an answer with no special token",
    "r1": "writes '<think>\\n', which it does not write in conversations: answers are trained with",
}
REMARKS["qwen3.5"] = REMARKS["r1"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_trained_token_ends_an_answer(tmp_path: Path, name: str, caplog: Any) -> None:
    """Generation stops at the last trained token of an answer; if not, a line says what to set."""
    tokenizer = family(tmp_path, name, unmarked(FAMILIES[name]))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": CHATS["two turns"]}) + "\n")
    dataset = chat_dataset(tokenizer, source=str(rows))
    labels = dataset[0]["labels"]
    found = trained_texts(tokenizer, dataset[0]["tokens"], [label == -100 for label in labels])
    assert found == LEARNT.get(name, found) and len(found) == 2
    if name in REMARKS:
        assert caplog.text.count(REMARKS[name]) == 1 and "row 1" in caplog.text
        if name not in ("r1", "qwen3.5"):
            return
    else:
        assert "chat template" not in caplog.text
    stops = stop_ids(tokenizer, tmp_path)
    assert {label for label, after in zip(labels, [*labels[1:], -100], strict=True)
            if label != -100 == after} <= stops  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "zephyr", "r1", "glm", "smollm2"])
def test_a_developers_message_is_not_lost(tmp_path: Path, name: str) -> None:
    """Templates that do not know the role get it as a system message."""
    tokenizer = family(tmp_path, name)
    ids = tokenizer.encode_chat(CHATS["developer"][:2])
    role = "system" if name in ("qwen3", "zephyr", "r1") else "developer"
    first = {"role": role, "content": "Answer in French."}
    assert ids == theirs(tmp_path, [first, QUESTION], add_generation_prompt=True)[0]
    assert "Answer in French." in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("name", "chat", "words"),
    [
        ("zephyr", "tools", r"tool calls \(weather\) of message 2 of 3 \(assistant\)"),
        ("zephyr", "results", r"the content of message 2 of 3 \(tool\)"),
        ("zephyr", "reasoning", r"reasoning_content of message 2 of 3 \(assistant\)"),
        ("no-system", "system", r"the content of message 1 of 4 \(system\)"),
    ],
)
def test_a_prompt_that_is_left_out(tmp_path: Path, name: str, chat: str, words: str) -> None:
    """A server refuses what the model would not see."""
    template = None if name != "no-system" else FAMILIES["phi3"].replace(
        "{% if m.role == 'user' %}", "{% if m.role == 'system' %}{% elif m.role == 'user' %}", 1
    )  # fmt: skip
    messages = [*CHATS.get(chat, []), *said("u:a", "t:a", "u:b") * (chat == "results")][:3]
    messages += [QUESTION] * (messages[-1]["role"] == "assistant")
    tokenizer = family(tmp_path, name, template)
    with pytest.raises(UserError, match=f"the chat template leaves out {words}"):
        chat_tokens(tokenizer, messages)


def test_earlier_reasoning_of_a_prompt_may_go(tmp_path: Path) -> None:
    """Templates that know reasoning decide which of it the model sees again."""
    chat = [*CHATS["earlier reasoning"][:3]]
    for name, key in (("qwen3", "reasoning_content"), ("gpt-oss", "thinking"), ("r1", "content")):
        tokenizer = family(tmp_path, name)
        answer = {"role": "assistant", "content": "b", key: "<think>x</think>b"}
        assert "x" not in tokenizer.decode(tokenizer.encode_chat([chat[0], answer, chat[2]]))


def test_a_macro_writes_as_its_text(tmp_path: Path) -> None:
    for chat in (CHATS["two turns"], CHATS["two answers"], CHATS["odd"]):
        expected = family(tmp_path, "chatml").tokenize_messages(chat)
        assert family(tmp_path, "macro", MACRO).tokenize_messages(chat) == expected


def test_a_long_conversation(tmp_path: Path) -> None:
    """Two renders, however many messages there are."""
    chat = [*said("u:" + "q" * 300, "a:" + "r" * 300)] * 1000
    tokenizer = family(tmp_path, "qwen3")
    tokens, mask = tokenizer.tokenize_messages(chat)
    assert len(tokens) > 600_000 and sum(mask) < len(mask) / 1.9
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "render", lambda self, requests: asked.extend(requests) or [
            UserError("not rendered") for _ in requests])  # fmt: skip
        tokenizer.tokenize_chats([{"messages": chat}])
    assert len(asked) == 1 and len(asked[0].messages) == 2000
