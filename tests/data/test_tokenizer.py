"""`HFTokenizer`: the ids of transformers, and masks that train only answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from qfsdp.common.errors import UserError
from qfsdp.data.chat.special_tokens import SpecialTokens, added_tokens
from qfsdp.data.tokenizer import HFTokenizer, hf_tokenizer

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set turns = messages %}{% set system = '' %}{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() }}"
    "{{ ' [/INST]' }}{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
NO_EARLIER_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EVERYTHING = (
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m | tojson }}{{ m | tojson(indent=2) }}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}"
)
SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": " What is 17 + 25?\n"},
    {"role": "assistant", "content": "It is 42. Zażółć 🙂 你好"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes,\n  quite sure."},
]
CORPUS = [message["content"] for message in CHAT] * 3 + ["system user assistant [INST] [/INST]"]


def byte_level() -> Tokenizer:
    """As GPT-2 and Llama 3 have it. Leaves leading spaces out of the offsets."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def llama2_like() -> Tokenizer:
    """Sentencepiece in `tokenizer.json`: writes spaces as "▁" and puts one at the start."""
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", *sorted(set("".join(CORPUS)) - {" ", "\n"}), "▁s", "▁i", "IN", "Y", "▁Y"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "s"), ("▁", "i"), ("▁", "Y")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def write_folder(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """A model folder whose tokenizer.json has truncation and padding, as some models do."""
    backend.enable_truncation(4)
    backend.enable_padding()
    backend.save(str(folder / "tokenizer.json"))
    added = {"__type": "AddedToken", "content": "</s>", "special": True}
    names = {"bos_token": "<s>", "eos_token": added}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def oracle_ids(folder: Path, messages: list[dict[str, str]], **options: Any) -> list[int]:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    return list(oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def trained_texts(tokenizer: HFTokenizer, tokens: list[int], mask: list[bool]) -> list[str]:
    """Text of each run of trained tokens."""
    runs: list[list[int]] = []
    for index, masked in enumerate(mask):
        if not masked:
            if index == 0 or mask[index - 1]:
                runs.append([])
            runs[-1].append(tokens[index])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    ("template", "backend", "answer"),
    [
        (CHATML, byte_level, "{}<|im_end|>"),
        (LLAMA3, byte_level, "{}<|eot_id|>"),
        (LLAMA2, byte_level, " {} </s>"),
        (LLAMA2, llama2_like, " {} </s>"),
    ],
    ids=["chatml", "llama3", "llama2", "llama2-sentencepiece"],
)
def test_templates(tmp_path: Path, template: str, backend: Any, answer: str) -> None:
    folder = write_folder(tmp_path, backend(), chat_template=template)
    tokenizer = hf_tokenizer(str(folder))
    tokens, mask = tokenizer.tokenize_messages(CHAT)
    assert tokens == oracle_ids(folder, CHAT)
    expected = [answer.format(CHAT[2]["content"]), answer.format(CHAT[4]["content"])]
    assert trained_texts(tokenizer, tokens, mask) == expected
    # The prompt at inference is exactly the text before the trained tokens.
    sample = tokenizer({"messages": CHAT[:4]}, inference=True)
    prompt = sample["tokens"]
    assert "messages" not in sample
    assert prompt == oracle_ids(folder, CHAT[:4], add_generation_prompt=True)
    assert prompt == tokens[: len(prompt)]
    assert mask[len(prompt) - 1 : len(prompt) + 1] == [True, False]


def test_smollm2_like_transformers(smollm2_dir: Path) -> None:
    tokenizer = hf_tokenizer(str(smollm2_dir))
    for messages in (CHAT, CHAT[1:], CHAT[1:3]):
        tokens, mask = tokenizer.tokenize_messages(messages)
        assert tokens == oracle_ids(smollm2_dir, messages)
        answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert trained_texts(tokenizer, tokens, mask) == answers
    assert tokenizer.pad_id == tokenizer.eos_id == 2
    assert tokenizer.vocab_size == 49152


def test_template_environment_matches_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, byte_level(), chat_template=EVERYTHING)
    messages = [{"role": "user", "content": "<b> & 'é'"}] * 4
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    expected = oracle.apply_chat_template(messages, tokenize=False)
    assert hf_tokenizer(str(folder)).render(messages) == expected


def test_masked_messages_and_torchtune_messages(tmp_path: Path) -> None:
    from torchtune.data import Message

    tokenizer = hf_tokenizer(str(write_folder(tmp_path, byte_level(), chat_template=CHATML)))

    def trained(masked: list[bool]) -> list[str]:
        messages = [
            Message(role=m["role"], content=m["content"], masked=hide)
            for m, hide in zip(CHAT, masked, strict=True)
        ]
        sample = tokenizer({"messages": messages, "kept": 1})
        assert sample["kept"] == 1
        assert sample["tokens"] == tokenizer.tokenize_messages(CHAT)[0]
        return trained_texts(tokenizer, sample["tokens"], sample["mask"])

    assert trained([True, True, True, True, False]) == ["Yes,\n  quite sure.<|im_end|>"]
    assert trained([True] * 5) == []
    assert trained([True, True, True, False, True]) == [
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    ]
    rendered = tokenizer.render(CHAT)
    assert "".join(trained([False] * 5)).replace("\n", "") == rendered.replace("\n", "")
    tool = [*CHAT[:2], Message(role="ipython", content="42", masked=True), CHAT[2]]
    assert "<|im_start|>tool\n42<|im_end|>" in tokenizer.render(tool)


def test_system_prompt_folded_into_the_user_turn(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=LLAMA2)
    tokenizer = hf_tokenizer(str(folder))
    messages = [{**m, "masked": m["role"] == "system"} for m in CHAT[:3]]
    tokens, mask = tokenizer.tokenize_messages(messages)
    assert not any(mask)  # the text does not show where the system prompt ends
    assert tokens == oracle_ids(folder, CHAT[:3])


def test_truncation_keeps_the_beginning(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, byte_level(), chat_template=CHATML))
    tokens, mask = hf_tokenizer(folder).tokenize_messages(CHAT)
    for limit in (1, 40, len(tokens) - 1, len(tokens), len(tokens) + 1):
        cut = hf_tokenizer(folder, max_seq_len=limit).tokenize_messages(CHAT)
        assert cut == (tokens[:limit], mask[:limit])


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=NO_EARLIER_THOUGHTS)
    tokenizer = hf_tokenizer(str(folder))
    thought = {"role": "assistant", "content": "<think>hm</think>It is 42."}
    chat = [CHAT[1], thought, CHAT[3], CHAT[4]]
    with pytest.raises(UserError, match="before </think> of message 2 of 4.*last_turn_only"):
        tokenizer.tokenize_messages(chat)
    chat[1] = {**thought, "masked": True}
    tokens, mask = tokenizer.tokenize_messages(chat)
    assert trained_texts(tokenizer, tokens, mask) == ["Yes,\n  quite sure.<|im_end|>"]


def test_inference_drops_torchtunes_empty_answer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=CHATML)
    tokenizer = hf_tokenizer(str(folder))
    asked = [*CHAT[:2], {"role": "assistant", "content": ""}]
    tokens = tokenizer({"messages": asked}, inference=True)["tokens"]
    assert tokens == oracle_ids(folder, CHAT[:2], add_generation_prompt=True)


def test_encode_and_decode(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(write_folder(tmp_path, byte_level())))
    text = "  It is\n42 🙂"
    ids = tokenizer.encode(text)
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.encode(text, add_bos=False, add_eos=False) == ids[:-1]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{text}</s>"
    assert tokenizer.pad_id == tokenizer.eos_id


def test_which_chat_template_is_used(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "config"}, {"name": "rag", "template": "rag"}]
    folder = write_folder(tmp_path, byte_level(), chat_template=named)
    assert hf_tokenizer(str(folder)).render(CHAT) == "config"
    (folder / "chat_template.json").write_text('{"chat_template": "json"}', encoding="utf-8")
    assert hf_tokenizer(str(folder)).render(CHAT) == "json"
    (folder / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert hf_tokenizer(str(folder)).render(CHAT) == "jinja"
    assert hf_tokenizer(str(folder), chat_template="{{ 7 }}").render(CHAT) == "7"
    file = str(folder / "chat_template.jinja")
    assert hf_tokenizer(str(folder), chat_template=file).render(CHAT) == "jinja"


def test_files_beside_the_config_as_transformers_reads_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, byte_level(), eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|eot_id|>"}}')
    (folder / "chat_template.jinja").write_text("{{ eos_token }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools[0].name }}")
    (folder / "additional_chat_templates/rag.jinja").write_text("rag")
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = hf_tokenizer(str(folder))
    assert tokenizer.eos_id == oracle.eos_token_id
    tool = {"name": "f", "type": "function"}
    for tools in (None, [tool]):
        theirs = oracle.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert tokenizer.render(CHAT, tools=tools) == theirs
    assert theirs == "f"


LISTED = {"content": "<x>", "special": False, "normalized": False}


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"added_tokens_decoder": {"9": LISTED | {"content": "<y>"}, "10": LISTED}}, {}),
        ({"extra_special_tokens": ["<x>", "<y>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<x>"}}, {}),
        ({"additional_special_tokens": ["<x>"]}, {}),
        ({"extra_special_tokens": 5, "additional_special_tokens": "<x>"}, {}),
        ({}, {"<y>": 10, "<x>": 9}),
        ({"eos_token": "ab"}, {}),
    ],
)
def test_tokens_that_only_other_files_name(tmp_path: Path, config: Any, older: Any) -> None:
    """Read as text they would have other ids than at inference."""
    transformers = pytest.importorskip("transformers")
    file = write_folder(tmp_path, byte_level(), **config) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["ab"] = len(content["model"]["vocab"]) + 100  # by no merge
    file.write_text(json.dumps(content | {"padding": None}))
    if older:
        (tmp_path / "added_tokens.json").write_text(json.dumps(older))
    tokenizer = hf_tokenizer(str(tmp_path))
    if config.get("extra_special_tokens") == 5:  # transformers raises
        return
    oracle = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.vocabulary == oracle.get_vocab()
    for text in ("a <x> <y>", "aab"):
        assert tokenizer.encode(text, add_bos=False, add_eos=False) == oracle.encode(text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": None}, "names no eos_token"),
        ({"pad_token": "<nope>"}, "pad_token '<nope>' is not a token"),
        ({"chat_template": "{% if %}"}, "chat template, line 1"),
        ({"chat_template": " "}, "chat_template is empty; expected a template or none"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, r"\['rag'\] but no 'default'"),
    ],
)
def test_faulty_folders(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hf_tokenizer(str(write_folder(tmp_path, byte_level(), **config)))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        hf_tokenizer(str(tmp_path))
    write_folder(tmp_path, byte_level(), chat_template=LLAMA2)
    with pytest.raises(UserError, match=r"'missing\.jinja' does not exist; expected auto"):
        hf_tokenizer(str(tmp_path), chat_template="missing.jinja")
    with pytest.raises(UserError, match="rejects the conversation: roles must alternate"):
        hf_tokenizer(str(tmp_path)).render(CHAT[2:])
    with pytest.raises(UserError, match="expected a role and text content"):
        hf_tokenizer(str(tmp_path)).render([{"role": "user", "content": None}])
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not valid JSON"):
        hf_tokenizer(str(tmp_path))


def test_tokens_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call builds anew what finds all of them: 3,000 took 11 s, one by one."""
    backend, calls = byte_level(), []
    special = [f"<{number}>" for number in range(300)]
    backend.add_special_tokens(special)

    class Counting:
        """A tokenizer of `tokenizers`."""

        def __init__(self, inner: Tokenizer) -> None:
            vars(self)["inner"] = inner

        @classmethod
        def from_str(cls, text: str) -> Counting:
            return cls(Tokenizer.from_str(text))

        def add_tokens(self, tokens: Any) -> Any:
            calls.append(tokens)
            return self.inner.add_tokens(tokens)

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self)["inner"], name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.inner, name, value)

    monkeypatch.setattr("tokenizers.Tokenizer", Counting)
    tokens = SpecialTokens(backend, added_tokens(backend, special_only=True))
    hidden, names = tokens.hide("say <7>")
    ids, _ = tokens.encode_chat(f"<8>{hidden}<299>", names, [])
    assert len(calls) == 1
    first, last = (backend.token_to_id(name) for name in ("<8>", "<299>"))
    assert ids == [first, *tokens.encode_plain("say <7>"), last]
