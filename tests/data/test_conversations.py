"""Instruction and chat datasets: trained tokens, skipped rows and error messages."""

from __future__ import annotations

import base64
import csv
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.convert import as_component
from qfsdp.data.chat.messages import as_message
from qfsdp.data.components import build_dataset
from qfsdp.data.conversations import chat_dataset, instruct_dataset
from qfsdp.data.files.rows import check_source
from qfsdp.data.loader import StepLoader
from qfsdp.data.tokenized_dataset import TokenizedDataset
from qfsdp.data.tokenizer import HFTokenizer, hf_tokenizer

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
SYSTEM += "<|im_end|>\n"
PAIRS = [{"prompt": f"{i} + {i}?", "answer": f"It is {2 * i}."} for i in range(6)]
CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> HFTokenizer:
    return hf_tokenizer(str(smollm2_dir))


def write(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def texts(tokenizer: Any, dataset: TokenizedDataset, index: int = 0) -> tuple[str, str]:
    """Text of a sample, and text of its trained tokens."""
    sample = dataset[index]
    assert len(sample["tokens"]) == len(sample["labels"])
    trained = [label for label in sample["labels"] if label != -100]
    return tuple(tokenizer.decode(ids, False) for ids in (sample["tokens"], trained))


def test_instruct(tokenizer: HFTokenizer, tmp_path: Path, caplog: Any) -> None:
    source = write(tmp_path / "pairs.jsonl", PAIRS)
    with caplog.at_level(logging.INFO, logger="qfsdp"):
        dataset = instruct_dataset(tokenizer, source=source)
    assert len(dataset) == 6
    assert texts(tokenizer, dataset, 3) == (
        f"{SYSTEM}<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\nIt is 6.<|im_end|>\n",
        "It is 6.<|im_end|>",
    )
    assert dataset[-1] == dataset[5]
    with pytest.raises(IndexError):
        dataset[6]
    (record,) = [record for record in caplog.records if record.name == "qfsdp"]
    assert (record.levelname, "6 of 6 rows used" in record.getMessage()) == ("INFO", True)
    assert isinstance(dataset[0]["tokens"][0], int)


def test_instruct_options(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    rows = [{"instruction": "Add {x}.", "input": None, "out": 42}, {"input": "2 2", "out": "4"}]
    dataset = instruct_dataset(
        tokenizer,
        source=write(tmp_path / "rows.jsonl", rows),
        answer_column="out",
        system_prompt="Be short.",
        prompt_template="{instruction}\n{input}",
        train_on_input=True,
    )
    system = "<|im_start|>system\nBe short.<|im_end|>\n"
    question = "<|im_start|>user\nAdd {x}.<|im_end|>\n<|im_start|>assistant\n"
    whole, trained = texts(tokenizer, dataset)
    assert whole == f"{system}{question}42<|im_end|>\n"
    assert trained == f"{question}42<|im_end|>"
    assert "user\n2 2<|im_end|>" in texts(tokenizer, dataset, 1)[0]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "folder", "data_files", "builder"])
def test_source_types(tokenizer: HFTokenizer, tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    options: dict[str, Any] = {"source": str(tmp_path / f"rows.{kind}")}
    if kind == "json":
        (tmp_path / "rows.json").write_text(json.dumps(PAIRS, indent=1), encoding="utf-8")
    elif kind == "csv":
        with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(PAIRS)
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "rows.parquet")
    else:
        write(tmp_path / "train.jsonl", PAIRS[:4])
        write(tmp_path / "test.jsonl", PAIRS[4:])
        options = {"source": str(tmp_path)}
        if kind == "data_files":
            options = {"source": str(tmp_path), "data_files": "t*.jsonl"}
        if kind == "builder":
            options = {"source": "json", "data_files": str(tmp_path / "train.jsonl")}
    dataset = instruct_dataset(tokenizer, **options)
    assert len(dataset) == (4 if kind == "builder" else 6)
    assert "It is 0.<|im_end|>" in {texts(tokenizer, dataset, i)[1] for i in range(len(dataset))}
    assert len(instruct_dataset(tokenizer, **options, max_rows=2)) == 2
    if kind == "json":  # splits part of the training set off
        for split, size in (("train[:67%]", 4), ("train[67%:]", 2)):
            assert len(instruct_dataset(tokenizer, **options, split=split)) == size


def test_unusable_rows_are_counted(smollm2_dir: Path, tmp_path: Path, caplog: Any) -> None:
    rows = [*PAIRS, {"prompt": "a", "answer": " "}, {"prompt": "b", "answer": None}]
    rows += [{"prompt": "word " * 100, "answer": "x"}, {"prompt": "c", "answer": "word " * 100}]
    tokenizer = hf_tokenizer(str(smollm2_dir), max_seq_len=64)
    dataset = instruct_dataset(tokenizer, source=write(tmp_path / "rows.jsonl", rows))
    assert len(dataset) == 7
    (record,) = [record for record in caplog.records if record.name == "qfsdp"]
    assert record.levelname == "WARNING"
    assert "7 of 10 rows used" in record.getMessage()
    assert "2 with an empty answer, 1 with no trained token" in record.getMessage()
    assert "1 reach max_seq_len 64" in record.getMessage()
    with pytest.raises(UserError, match="none of 2 rows can be used: 2 with an empty answer"):
        instruct_dataset(tokenizer, source=write(tmp_path / "none.jsonl", rows[6:8]))
    part = {"_component_": "qfsdp.data.instruct_dataset", "split": "train[:1%]"}
    held_out = as_component(part | {"source": str(tmp_path / "rows.jsonl")}, "validation.sets.a")
    with pytest.raises(UserError, match=r"^validation\.sets\.a\.split: no row of .*rows\.jsonl"):
        build_dataset("validation.sets.a", held_out, tokenizer)


@pytest.mark.parametrize("form", ["openai", "sharegpt", "parts"])
def test_chat(tokenizer: HFTokenizer, tmp_path: Path, form: str) -> None:
    if form == "openai":
        messages: list[Any] = CHAT
    elif form == "parts":
        messages = [
            {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in CHAT
        ]
    else:
        names = {"user": "human", "assistant": "gpt"}
        messages = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    source = write(tmp_path / "chats.jsonl", [{"talk": messages}])
    options: dict[str, Any] = {"source": source, "messages_column": "talk"}
    dataset = chat_dataset(tokenizer, **options)
    whole, trained = texts(tokenizer, dataset)
    assert whole == tokenizer.render(CHAT)
    assert trained == "4.<|im_end|>Yes.<|im_end|>"
    last = chat_dataset(tokenizer, **options, train_on_last_turn_only=True)
    assert texts(tokenizer, last) == (whole, "Yes.<|im_end|>")
    everything = chat_dataset(tokenizer, **options, train_on_input=True)
    assert texts(tokenizer, everything)[1].replace("\n", "") == whole.replace("\n", "")
    with pytest.raises(UserError, match="expected at most one of them"):
        chat_dataset(tokenizer, **options, train_on_input=True, train_on_last_turn_only=True)


def test_names_of_roles(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """Of Gemini and of chat programs, in any letters."""
    for answers in ("model", "Assistant", "ChatGPT", "bot"):
        turns = [CHAT[0] | {"role": "Human"}, {"role": answers, "content": "Yes."}]
        dataset = chat_dataset(tokenizer, source=write(tmp_path / "x.jsonl", [{"messages": turns}]))
        assert texts(tokenizer, dataset)[1] == "Yes.<|im_end|>"


def test_chat_rows(tokenizer: HFTokenizer, tmp_path: Path, caplog: Any) -> None:
    weighted = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    empty = [CHAT[0], {"role": "assistant", "content": ""}]
    rows = [{"messages": m} for m in (weighted, empty, CHAT[:1], None)]
    dataset = chat_dataset(tokenizer, source=write(tmp_path / "chats.jsonl", rows))
    assert len(dataset) == 1
    assert texts(tokenizer, dataset)[1] == "Yes.<|im_end|>"
    assert "1 with an empty answer, 2 with no answer" in caplog.text
    rows.append({"messages": [{"role": "robot", "content": "x"}]})
    with pytest.raises(UserError, match="row 5: a message with role 'robot'"):
        chat_dataset(tokenizer, source=write(tmp_path / "robot.jsonl", rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_column": "anser"}, "no column 'anser' .* expected one of answer, prompt$"),
        ({"prompt_column": "Promt"}, "no column 'Promt' .* expected one of prompt, answer$"),
        ({"prompt_template": "{q}"}, "prompt_template: no column 'q'"),
        ({"prompt_template": "{prompt"}, "prompt_template: '{prompt': expected '}'"),
        ({"prompt_template": "prompt"}, "names no column"),
        ({"max_rows": 0}, "max_rows: 0; expected an integer of at least 1"),
        ({"split": "test"}, "split test: Unknown split"),
        ({"data_files": "x.jsonl"}, "data_files: x.jsonl together with the single file"),
    ],
)
def test_faulty_options(
    tokenizer: HFTokenizer, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = write(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(UserError, match=message) as caught:
        instruct_dataset(tokenizer, source=source, **options)
    assert "\n" not in str(caught.value)


def test_faulty_files(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    good = json.dumps(PAIRS[0])
    lines = tmp_path / "bad.jsonl"
    lines.write_text(f"{good}\n\n{good}\n{good[:-5]}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.jsonl, line 4: not valid JSON"):
        instruct_dataset(tokenizer, source=str(lines))
    whole = tmp_path / "bad.json"
    whole.write_text(f"[\n{good},\n{good}\n{good}]", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.json, line 4: not valid JSON"):
        instruct_dataset(tokenizer, source=str(whole))
    nested = write(tmp_path / "nested.jsonl", [{"prompt": {"a": 1}, "answer": "x"}])
    with pytest.raises(UserError, match="row 1: a dict: .*; expected text"):
        instruct_dataset(tokenizer, source=nested)
    messages = [{"prompt": json.dumps(CHAT[:1]), "answer": "x"}]
    with pytest.raises(UserError, match="row 1: column 'prompt': .*: messages; expected text, or"):
        instruct_dataset(tokenizer, source=write(tmp_path / "messages.jsonl", messages))


def test_check_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.doc").write_text("x", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "good.jsonl", PAIRS)
    for source in ("missing.jsonl", "./missing", "/missing", "~/missing", "a/b/c", "a/b.csv", ""):
        with pytest.raises(UserError, match=f"^data.source: {source or 'an empty name'} does not"):
            check_source("data.source", source)
    with pytest.raises(UserError, match=r"empty\.jsonl is empty"):
        check_source("data.source", "empty.jsonl")
    with pytest.raises(UserError, match=r"unknown suffix '\.doc'"):
        check_source("data.source", "notes.doc")
    with pytest.raises(UserError, match="folder holds no data file"):
        check_source("data.source", "folder")
    for source in ("good.jsonl", str(tmp_path / "good.jsonl"), ".", "tatsu-lab/alpaca", "squad"):
        check_source("data.source", source)


def sentencepiece_tokenizer(folder: Path) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    from torchtune.models.llama2 import llama2_tokenizer

    lines = [f"{pair['prompt']} {pair['answer']} [INST] Sure? Yes. [/INST]" for pair in PAIRS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    return llama2_tokenizer(str(folder / "tokenizer.model"))


def tiktoken_tokenizer(folder: Path) -> Any:
    pytest.importorskip("tiktoken")
    from torchtune.models.llama3 import llama3_tokenizer

    ranks = [base64.b64encode(bytes([byte])).decode() + f" {byte}\n" for byte in range(256)]
    (folder / "tokenizer.model").write_text("".join(ranks), encoding="ascii")
    return llama3_tokenizer(str(folder / "tokenizer.model"))


@pytest.mark.parametrize("build", [sentencepiece_tokenizer, tiktoken_tokenizer])
def test_torchtune_tokenizers(tmp_path: Path, build: Any) -> None:
    tokenizer = build(tmp_path)
    instruct = instruct_dataset(
        tokenizer, source=write(tmp_path / "pairs.jsonl", PAIRS), system_prompt="Add."
    )
    chat = chat_dataset(tokenizer, source=write(tmp_path / "chats.jsonl", [{"messages": CHAT}]))
    for dataset, index, answers in ((instruct, 3, ["It is 6."]), (chat, 0, ["4.", "Yes."])):
        labels = dataset[index]["labels"]
        trained = tokenizer.decode([label for label in labels if label != -100])
        assert [answer for answer in answers if answer in trained] == answers
        assert "+" not in trained and "Sure" not in trained and "Add" not in trained
        assert labels[-1] in tokenizer.stop_tokens or labels[-2] in tokenizer.stop_tokens
    options = {"batch_size": 2, "gradient_accumulation_steps": 1, "rank": 0, "world_size": 1}
    loader = StepLoader(instruct, **options, seed=0, pad_id=tokenizer.pad_id, max_seq_len=None)
    assert sum(batch.num_targets for batch in loader.step(0)) > 0


def test_errors_of_torchtunes_templates(tmp_path: Path) -> None:
    from torchtune.models.mistral import MistralChatTemplate

    tokenizer = sentencepiece_tokenizer(tmp_path)
    tokenizer.prompt_template = MistralChatTemplate()
    source = write(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(UserError, match="row 1: System prompts are not supported"):
        instruct_dataset(tokenizer, source=source, system_prompt="Add.")


@pytest.mark.long
def test_gsm8k(tokenizer: HFTokenizer, caplog: Any) -> None:
    if not GSM8K.is_file():
        pytest.skip(f"no {GSM8K}")
    with caplog.at_level(logging.INFO, logger="qfsdp"):
        dataset = instruct_dataset(tokenizer, source=str(GSM8K), prompt_column="question")
    assert len(dataset) == 7473
    assert "7473 of 7473 rows used" in caplog.text and "left out" not in caplog.text


def test_importing_needs_torch_only() -> None:
    heavy = "{'torchtune', 'torchao', 'datasets', 'jinja2', 'tokenizers', 'transformers'}"
    code = f"import torch, sys; before = set(sys.modules); import qfsdp.data; \
        print(sorted({heavy} & (set(sys.modules) - before)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def _asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    "history", [[["a", "b"]], '[["a", "b"]]', [_asked("a"), _said("b")], None, "", []]
)
def test_system_and_history_of_other_projects(
    tokenizer: HFTokenizer, tmp_path: Path, history: Any
) -> None:
    """LLaMA-Factory's columns: the same sample as of the conversation written out."""
    row = {"prompt": "c", "answer": "d", "system": "Be short.", "history": history}
    source = write(tmp_path / "a.jsonl", [row, {**row, "system": None}])
    keys = {"system_column": "system", "history_column": "history"}
    given = instruct_dataset(tokenizer, source=source, system_prompt="Else.", **keys)
    earlier = [_asked("a"), _said("b")] if history else []
    rows = [
        {"messages": [{"role": "system", "content": text}, *earlier, _asked("c"), _said("d")]}
        for text in ("Be short.", "Else.")
    ]
    written = chat_dataset(tokenizer, source=write(tmp_path / "b.jsonl", rows))
    assert [given[0], given[1]] == [written[0], written[1]]
    columns = [
        {"text": row["messages"][1:], "system": row["messages"][0]["content"]} for row in rows
    ]
    source = write(tmp_path / "c.jsonl", columns)
    options = {"messages_column": "text", "system_column": "system"}
    apart = chat_dataset(tokenizer, source=source, **options)
    assert [apart[0], apart[1]] == [written[0], written[1]]


def test_malformed_history(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    for value, words in (
        ("[", "not valid JSON"),
        ({"a": 1}, "expected a list of pairs"),
        ([1], ""),
    ):
        source = write(tmp_path / "a.jsonl", [{"prompt": "c", "answer": "d", "past": value}])
        with pytest.raises(UserError, match=f"row 1.*{words}"):
            instruct_dataset(tokenizer, source=source, history_column="past")


@pytest.mark.parametrize(
    "key", [{"train": False}, {"weight": 0}, {"training": False}, {"loss": False}, {"loss": 0}]
)
def test_a_turn_that_is_not_trained(tokenizer: HFTokenizer, tmp_path: Path, key: Any) -> None:
    turns = [_asked("a"), _said("b", **key), _asked("c"), _said("d", train=True)]
    dataset = chat_dataset(tokenizer, source=write(tmp_path / "a.jsonl", [{"messages": turns}]))
    assert texts(tokenizer, dataset)[1] == "d<|im_end|>"
    turns[2]["training"] = True  # a question: ignored before
    dataset = chat_dataset(tokenizer, source=write(tmp_path / "q.jsonl", [{"messages": turns}]))
    question = texts(tokenizer, dataset)[1]
    assert "user\nc<|im_end|>" in question and "a<|im_end|>" not in question
    turns[1]["train"] = "no"
    with pytest.raises(UserError, match="train: 'no' of a message; expected true or false"):
        chat_dataset(tokenizer, source=write(tmp_path / "b.jsonl", [{"messages": turns}]))


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss", 0.5), ("weight", "0"), ("train_detail", [{"train": False}]), ("loss_scale", 2.0)],
)
def test_weights_that_are_not_0_or_1(
    tokenizer: HFTokenizer, tmp_path: Path, key: str, value: Any
) -> None:
    turns = [_asked("a") | {"loss": None}, _said("b", **{key: value})]
    with pytest.raises(UserError, match=f"row 1: {key}: .* of a message.*true or false"):
        chat_dataset(tokenizer, source=write(tmp_path / "a.jsonl", [{"messages": turns}]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["a.jpg"]}, r"row 2: column 'images' holds .*expected rows of text alone"),
        ({"image": "a.jpg"}, "row 2: column 'image' holds 'a.jpg'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *CHAT[1:]]},
            r"row 2: content that is not text \('image_url'\); expected text alone",
        ),
    ],
)
def test_rows_with_pictures_are_refused_by_number(
    tokenizer: HFTokenizer, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    chats: list[Any] = [{"messages": CHAT, "images": [], "image": None}, {"messages": CHAT} | row]
    with pytest.raises(UserError, match=message):
        chat_dataset(tokenizer, source=write(tmp_path / "a.jsonl", chats))


def test_unread_columns_of_alpaca_are_named(
    tokenizer: HFTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"instruction": "Translate.", "input": "Haus", "output": "house"}
    source, unread = write(tmp_path / "a.jsonl", [row]), "column 'input' is not read; "
    given = {"source": source, "answer_column": "output"}
    instruct_dataset(tokenizer, **given, prompt_template="{instruction} {input}")
    assert unread not in caplog.text
    instruct_dataset(tokenizer, **given, prompt_column="instruction")
    assert f"{unread}dataset.prompt_template='...{{input}}...' reads it" in caplog.text
    caplog.clear()
    chats = write(tmp_path / "b.jsonl", [{"messages": CHAT, "chat_template_kwargs": {}} | row])
    chat_dataset(tokenizer, source=chats)
    assert f"{chats}: column 'chat_template_kwargs' is not read" in caplog.text
    assert "'input'" not in caplog.text


def test_unread_columns_of_other_projects_are_named(
    tokenizer: HFTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"system": "s", "history": [], "functions": [], "tools": [], "loss_mask": [1]}
    pairs = write(tmp_path / "pairs.jsonl", [PAIRS[0] | extra])
    instruct_dataset(tokenizer, source=pairs, system_column="system")
    said = [record.getMessage() for record in caplog.records]
    assert f"{pairs}: column 'history' is not read; dataset.history_column=history reads it" in said
    assert (
        f"{pairs}: column 'functions' is not read; dataset.tools_column=functions reads it" in said
    )
    assert not any("'system'" in line for line in said)
    chats = write(tmp_path / "chats.jsonl", [{"messages": CHAT} | extra])
    caplog.clear()
    chat_dataset(tokenizer, source=chats)
    said = [record.getMessage() for record in caplog.records]
    assert (
        f"{chats}: column 'functions' is not read; dataset.tools_column=functions reads it" in said
    )
    assert f"{chats}: column 'loss_mask' is not read" in said
    assert not any("'tools'" in line for line in said)


@pytest.mark.parametrize("keys", [("role", "value"), ("from", "content")])
def test_keys_of_both_forms_in_one_message(keys: tuple[str, str]) -> None:
    """The text was read as empty."""
    who, said = keys
    assert as_message({who: "user", said: "Hi"}) == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("key", ["text", "Content", "parts", "result", "output"])
def test_a_text_in_another_key(key: str) -> None:
    """A question or the result of a call would be empty, and the answer trained without."""
    for value in ("Hi", ["Hi"], {"celsius": 0}, 0):
        with pytest.raises(UserError, match=f"'tool' whose text stands in '{key}': .* key content"):
            as_message({"role": "tool", "content": None, key: value})
    assert as_message({"role": "tool", "content": "", key: "Hi"})["content"] == ""
    assert as_message({"role": "tool", key: None})["content"] == ""
