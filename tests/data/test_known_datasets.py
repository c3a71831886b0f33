"""Builders for well-known datasets, plain text and random samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.config.load import load_config
from qfsdp.data import (
    alpaca_dataset,
    check_data,
    dummy_dataset,
    gsm8k_dataset,
    guanaco_dataset,
    hf_tokenizer,
    openassistant_dataset,
    orca_math_dataset,
    sharegpt_dataset,
    sql_create_context_dataset,
    text_dataset,
)
from qfsdp.data.known_datasets import turns_of_text
from qfsdp.data.loader import StepLoader
from qfsdp.data.packing import PackedDataset
from qfsdp.data.tokenized_dataset import Unusable
from qfsdp.data.tokenizer import HFTokenizer
from tests.data.test_conversations import CHAT, GSM8K, sentencepiece_tokenizer, texts, write

SHARED = GSM8K.parents[1]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> HFTokenizer:
    return hf_tokenizer(str(smollm2_dir))


def shared(name: str) -> str:
    if not (SHARED / name).is_file():
        pytest.skip(f"no {SHARED / name}")
    return str(SHARED / name)


@pytest.mark.parametrize(
    ("builder", "row", "prompt", "answer"),
    [
        (alpaca_dataset, {"instruction": "Add", "input": "2 2", "output": "4"}, "Add\n\n2 2", "4"),
        (alpaca_dataset, {"instruction": "Sing.", "input": "", "output": "La"}, "Sing.", "La"),
        (gsm8k_dataset, {"question": "2 + 2?", "answer": "#### 4"}, "2 + 2?", "#### 4"),
        (orca_math_dataset, {"question": "2 + 2?", "answer": "4"}, "2 + 2?", "4"),
        (
            sql_create_context_dataset,
            {"question": "How many?", "context": "CREATE TABLE t (a INT)", "answer": "SELECT 1"},
            "CREATE TABLE t (a INT)\n\nHow many?",
            "SELECT 1",
        ),
    ],
)
def test_prompt_and_answer(
    tokenizer: HFTokenizer, tmp_path: Path, builder: Any, row: Any, prompt: str, answer: str
) -> None:
    dataset = builder(tokenizer, source=write(tmp_path / "rows.jsonl", [row]))
    whole, trained = texts(tokenizer, dataset)
    assert f"<|im_start|>user\n{prompt}<|im_end|>\n" in whole
    assert trained == f"{answer}<|im_end|>"


def test_conversations(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """The same conversation in three forms."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    inst = "<s>[INST] 2 + 2? [/INST] 4. </s><s>[INST] Sure? [/INST] Yes. </s>"
    plain = "### Human: 2 + 2?### Assistant: 4.### Human: Sure?### Assistant: Yes."
    for builder, row in (
        (sharegpt_dataset, {"conversations": turns}),
        (guanaco_dataset, {"text": inst}),
        (openassistant_dataset, {"text": plain}),
    ):
        dataset = builder(tokenizer, source=write(tmp_path / "rows.jsonl", [row]))
        assert texts(tokenizer, dataset)[0] == tokenizer.render(CHAT)
        assert texts(tokenizer, dataset)[1] == "4.<|im_end|>Yes.<|im_end|>"


def test_text_is_split_into_messages() -> None:
    system = "<s>[INST] <<SYS>>\nBe short.\n<</SYS>>\n\nHi [/INST] Yo </s>"
    assert turns_of_text(system) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
    ]
    for text in ("once upon a time", "", "well: [INST] a [/INST] b", "<s>[INST] a", "x ### Human:"):
        with pytest.raises(Unusable):
            turns_of_text(text)


def test_guanaco(smollm2_dir: Path, caplog: Any) -> None:
    """Real rows as messages (the answers are the text between the marks) and as plain text."""
    source = shared("guanaco/guanaco-llama2-1k.jsonl")
    rows = [json.loads(line)["text"] for line in Path(source).read_text("utf-8").splitlines()]
    tokenizer = hf_tokenizer(str(smollm2_dir), max_seq_len=100_000)
    dataset = guanaco_dataset(tokenizer, source=source, max_rows=200)
    assert len(dataset) == 200 and "left out" not in caplog.text
    for index in range(0, 200, 20):
        answers = [part.split("</s>")[0].strip() for part in rows[index].split("[/INST]")[1:]]
        trained = texts(tokenizer, dataset, index)[1]
        assert trained == "".join(f"{answer}<|im_end|>" for answer in answers)
    assert all(len(turns_of_text(row)) == 2 * row.count("[/INST]") for row in rows)
    plain = text_dataset(tokenizer, source=source, max_rows=20)
    assert texts(tokenizer, plain, 7) == (f"{rows[7]}<|im_end|>",) * 2


def test_unusable_rows_are_counted(tokenizer: HFTokenizer, tmp_path: Path, caplog: Any) -> None:
    good = "[INST] a [/INST] b"
    rows = [{"text": text} for text in (good, "once", None, "[INST] a [/INST] ", "[INST] a")]
    source = write(tmp_path / "rows.jsonl", rows)
    assert len(guanaco_dataset(tokenizer, source=source)) == 1
    assert "1 of 5 rows used" in caplog.text
    assert "2 with neither [INST] nor ### Human: at its start" in caplog.text
    assert "1 with an empty answer, 1 with an [INST] that is not closed" in caplog.text
    caplog.clear()
    assert len(text_dataset(tokenizer, source=source, window=64)) == 4
    assert "4 of 5 rows used, 4 samples" in caplog.text and "1 with no text" in caplog.text
    with pytest.raises(UserError, match="text_column: no column 'texts' .* expected one of text"):
        guanaco_dataset(tokenizer, source=source, text_column="texts")
    with pytest.raises(UserError, match="no column 'question' .* expected one of text"):
        gsm8k_dataset(tokenizer, source=source)


@pytest.mark.parametrize("hub", ["gsm8k", "alpaca"])
def test_a_hub_name_is_the_default(
    tokenizer: HFTokenizer, tmp_path: Path, monkeypatch: Any, hub: str
) -> None:
    """Checks the request to the hub, which is replaced by our own rows."""
    import datasets

    row = {"question": "q", "answer": "a", "instruction": "i", "input": "", "output": "o"}
    rows = datasets.Dataset.from_list([row])
    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    {"gsm8k": gsm8k_dataset, "alpaca": alpaca_dataset}[hub](tokenizer, split="test")
    name = {"gsm8k": ("openai/gsm8k", "main"), "alpaca": ("tatsu-lab/alpaca", None)}[hub]
    assert asked == [(name, {"data_files": None, "split": "test", "streaming": False})]


@pytest.mark.parametrize("form", ["txt", "folder", "jsonl"])
def test_every_token_of_a_document_is_a_target_once(
    tokenizer: HFTokenizer, tmp_path: Path, form: str
) -> None:
    text = Path(shared("wikitext2/valid.txt")).read_text("utf-8")
    documents = [text[:4000], text[4000:9001]]
    if form == "jsonl":
        source = write(tmp_path / "documents.jsonl", [{"text": text} for text in documents])
    else:
        for name, document in zip("ab", documents, strict=True):
            (tmp_path / f"{name}.txt").write_text(document, "utf-8")
        source = str(tmp_path)
        if form == "txt":
            source, documents = str(tmp_path / "a.txt"), documents[:1]
    dataset = text_dataset(tokenizer, source=source, window=128)
    assert max(dataset.lengths) == 128
    expected = [tokenizer.encode(document) for document in documents]
    targets = [label for i in range(len(dataset)) for label in dataset[i]["labels"][1:]]
    assert targets == [token for tokens in expected for token in tokens[1:]]
    options = {"batch_size": 4, "gradient_accumulation_steps": 1, "rank": 0, "world_size": 1}
    packs = PackedDataset(dataset, 256, seed=0)
    loader = StepLoader(packs, **options, seed=0, pad_id=tokenizer.pad_id, max_seq_len=256)
    batches = [batch for step in range(loader.steps_per_epoch) for batch in loader.step(step)]
    assert sum(batch.num_targets for batch in batches) == len(targets)


def test_window_sizes(smollm2_dir: Path, tmp_path: Path) -> None:
    limited = hf_tokenizer(str(smollm2_dir), max_seq_len=32)
    source = write(tmp_path / "rows.jsonl", [{"text": "word " * 100}])
    assert max(text_dataset(limited, source=source).lengths) == 32
    for window, limit in ((1, 32), (33, 32), (None, None)):
        limited.max_seq_len = limit
        with pytest.raises(UserError, match=f"dataset.window: {window or 'null'}"):
            text_dataset(limited, source=source, window=window)


def test_text_with_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    source = write(tmp_path / "rows.jsonl", [{"text": "It is 6. Sure? Yes."}])
    sample = text_dataset(tokenizer, source=source, window=512)[0]
    assert sample["tokens"] == sample["labels"]
    assert sample["tokens"][0] == tokenizer.bos_id and sample["tokens"][-1] == tokenizer.eos_id
    assert tokenizer.decode(sample["tokens"]) == "It is 6. Sure? Yes."


def test_dummy(smollm2_dir: Path) -> None:
    tokenizer = hf_tokenizer(str(smollm2_dir), max_seq_len=48)
    dataset = dummy_dataset(tokenizer, samples=20)
    assert len(dataset) == 20 and dataset.lengths == [48] * 20
    assert dataset[3]["tokens"].shape == (48,) and dataset[-1] is not None
    assert torch.equal(dataset[3]["tokens"], dummy_dataset(tokenizer, samples=9)[3]["tokens"])
    assert not torch.equal(dataset[3]["tokens"], dataset[4]["tokens"])
    other = dummy_dataset(tokenizer, samples=9, seed=1, length=30, vocab_size=7)
    assert other[3]["tokens"].shape == (30,) and other[3]["tokens"].max() < 7
    with pytest.raises(IndexError):
        dataset[20]
    for options, message in (
        ({"samples": 0}, "dataset.samples: 0; expected an integer of at least 1"),
        ({"length": 1}, "dataset.length: 1; expected an integer of at least 2"),
    ):
        with pytest.raises(UserError, match=message):
            dummy_dataset(tokenizer, **options)
    tokenizer.max_seq_len = None
    with pytest.raises(UserError, match="dataset.length: 0; expected an integer of at least 2"):
        dummy_dataset(tokenizer)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"source": "missing.jsonl"}, "dataset.source: missing.jsonl does not exist"),
        ({"source": 5}, "dataset.source: 5 is not valid; expected a string"),
        ({"sorce": "x"}, "'qfsdp.data.alpaca_dataset' takes no argument 'sorce'; did you mean"),
        ({"max_rows": "many"}, "dataset.max_rows: 'many' is not valid"),
    ],
)
def test_faulty_options_are_found_before_reading(dataset: dict[str, Any], message: str) -> None:
    tokenizer = Component("qfsdp.data.hf_tokenizer", {"path": "."})
    with pytest.raises(UserError) as error:
        check_data(tokenizer, Component("qfsdp.data.alpaca_dataset", dataset), {})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_dataset_in_one_line_of_a_config(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    from tests.tiny import ROOT, load_recipe

    rows = [{"instruction": "Add.", "input": "2 2", "output": "4"}]
    source = write(tmp_path / "my.jsonl", rows)
    argv = ["--config", str(ROOT / "configs/smollm2_135m_qdora.yaml"), "~dataset"]
    argv += [f"dataset={{_component_: qfsdp.data.alpaca_dataset, source: {source}}}"]
    cfg = load_config(load_recipe().Config, argv)
    check_data(Component("qfsdp.data.hf_tokenizer", {"path": "."}), cfg.dataset, {})
    assert texts(tokenizer, cfg.dataset.build(tokenizer=tokenizer))[1] == "4<|im_end|>"
