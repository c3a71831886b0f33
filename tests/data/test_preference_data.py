"""Preference data: layouts, trained tokens, cuts, and batches for any number of ranks."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.data import (
    hf_tokenizer,
    hh_dataset,
    kto_dataset,
    orca_pairs_dataset,
    preference_dataset,
    ultrafeedback_dataset,
)
from qfsdp.data.preferences.loader import PreferenceLoader
from qfsdp.data.preferences.tokenized import RowLimit, build_preferences
from qfsdp.data.tokenizer import HFTokenizer
from tests.data.test_conversations import write

WIDE = RowLimit(2048)
ASK = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is 4.", "Five, I think."))
BEFORE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> HFTokenizer:
    return hf_tokenizer(str(smollm2_dir))


def halves(item: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and trained tokens of each sample of an item."""
    found, at = [], 0
    for n in item["parts"]:
        labels = item["labels"][at : at + n]
        found.append((item["tokens"][at : at + n], [t for t in labels if t != -100]))
        at += n
    return found


def build(builder: str, source: str, tokenizer: Any, limit: RowLimit = WIDE, **options: Any) -> Any:
    component = Component(f"qfsdp.data.{builder}", {"source": source, **options})
    return build_preferences("dataset", component, tokenizer, None, limit)


TEXT = {"chosen": GOOD["content"], "rejected": BAD["content"]}
TALK = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: 2 + 2?\n\nAssistant: "
LAYOUTS: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "text": (preference_dataset, TEXT | {"prompt": "2 + 2?"}, [ASK]),
    "messages": (
        preference_dataset,
        {"prompt": [*BEFORE, ASK], "chosen": [GOOD], "rejected": [BAD]},
        [*BEFORE, ASK],
    ),
    "cells with JSON": (
        preference_dataset,
        {"prompt": json.dumps([*BEFORE, ASK]), "chosen": f"[\n  {json.dumps(GOOD)}\n]"}
        | {"rejected": json.dumps([BAD])},
        [*BEFORE, ASK],
    ),
    "two columns": (  # LLaMA-Factory's; the second was dropped
        partial(preference_dataset, prompt_template="{instruction} {input}"),
        TEXT | {"instruction": "2 +", "input": "2?"},
        [ASK],
    ),
    "white space": (
        preference_dataset,
        {"prompt": "2 + 2? ", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        [ASK],
    ),
    "the prompt has more turns": (  # they were dropped
        preference_dataset,
        {"prompt": [*BEFORE, ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        [*BEFORE, ASK],
    ),
    "ultrafeedback": (
        ultrafeedback_dataset,
        {"prompt": "2 + 2?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        [ASK],
    ),
    "hh": (hh_dataset, {key: TALK + text for key, text in TEXT.items()}, [*BEFORE, ASK]),
    "the prompt as in hh": (  # it was one user message
        preference_dataset,
        TEXT | {"prompt": TALK.rstrip()},
        [*BEFORE, ASK],
    ),
    "orca": (
        orca_pairs_dataset,
        TEXT | {"system": "Be short.", "question": "2 + 2?"},
        [{"role": "system", "content": "Be short."}, ASK],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_tokens_of_transformers(
    layout: str, tokenizer: HFTokenizer, smollm2_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    builder, row, prompt = LAYOUTS[layout]
    oracle = AutoTokenizer.from_pretrained(smollm2_dir)
    options = {"split": "train"} if layout == "ultrafeedback" else {}
    source = write(tmp_path / "rows.jsonl", [row])
    dataset = builder(tokenizer, source=source, **options)
    for (tokens, trained), answer in zip(halves(dataset[0]), (GOOD, BAD), strict=True):
        expected = oracle.apply_chat_template([*prompt, answer], tokenize=False)
        assert tokens == oracle(expected, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(trained, False) == answer["content"] + "<|im_end|>"


def test_a_column_beside_the_prompt_is_told(
    tokenizer: HFTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(tmp_path / "rows.jsonl", [TEXT | {"instruction": "Add.", "input": "2 + 2"}])
    caplog.set_level(logging.INFO, "qfsdp")
    preference_dataset(tokenizer, source=source, prompt_column="instruction")
    assert "column 'input' is not read; dataset.prompt_template='...{input}...'" in caplog.text


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_files_of_every_kind(suffix: str, tokenizer: HFTokenizer, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"prompt": f"Is it {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(3)]
    file = tmp_path / f"rows.{suffix}"
    getattr(Dataset.from_list(rows), f"to_{suffix}")(file)
    expected = preference_dataset(tokenizer, source=write(tmp_path / "rows.jsonl", rows))
    dataset = preference_dataset(tokenizer, source=str(file))
    assert list(dataset) == list(expected)


def test_an_answer_that_is_not_to_be_trained(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """`"train": false` and its like: that answer is not trained; a row without any is left out."""

    def trained(**changed: Any) -> list[str]:
        source = write(tmp_path / "rows.jsonl", [row | changed])
        pairs = build("preference_dataset", source, tokenizer)
        return [tokenizer.decode(ids) for _, ids in halves(pairs[0])]

    turns = [GOOD | {"train": False}, {"role": "user", "content": "Sure?"}, GOOD]
    row = {"prompt": [ASK], "chosen": turns, "rejected": [BAD]}
    good, bad = trained()
    assert good.count(GOOD["content"]) == 1 and bad.count(BAD["content"]) == 1
    with pytest.raises(UserError, match="an answer that is not to be trained"):
        trained(rejected=[BAD | {"loss": False}])
    with pytest.raises(UserError, match="weight: '0.5' of a message; expected true or false"):
        trained(rejected=[BAD | {"weight": 0.5}])


def test_labelled_answers_and_their_mismatches(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}?", "completion": f"Answer {i}.", "label": label}
        for i, label in enumerate((True, "0", 1.0))
    ]
    dataset = kto_dataset(tokenizer, source=write(tmp_path / "rows.jsonl", rows))
    assert [item["desirable"] for item in dataset] == [True, False, True]
    for i, item in enumerate(dataset):
        assert tokenizer.decode(halves(item)[0][1], False) == f"Answer {i}.<|im_end|>"
        text = tokenizer.decode(item["mismatched"]["tokens"], False)
        assert f"{i}?" in text and f"Answer {(i + 1) % 3}." in text


def test_mismatches_have_other_prompts(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """Rows of a prompt are neighbours, as where pairs were written as answers with a label."""
    rows = [
        {"prompt": f"{prompt}?", "completion": f"Answer {prompt} {i}.", "label": i % 2 == 0}
        for prompt, count in (("a", 2), ("b", 3), ("c", 1), ("d", 2))
        for i in range(count)
    ]
    dataset = kto_dataset(tokenizer, source=write(tmp_path / "rows.jsonl", rows))
    texts = [tokenizer.decode(item["mismatched"]["tokens"], False) for item in dataset]
    answers = [rows[(i + 3) % 8]["completion"] for i in range(8)]
    for row, answer, text in zip(rows, answers, texts, strict=True):
        assert row["prompt"] in text and str(answer) in text
        assert f"Answer {str(row['prompt'])[0]}" not in text
    write(tmp_path / "rows.jsonl", [row | {"prompt": "a?"} for row in rows])
    same = kto_dataset(tokenizer, source=str(tmp_path / "rows.jsonl"))
    assert "Answer b 0." in tokenizer.decode(same[1]["mismatched"]["tokens"], False)


LONG = {"prompt": "A long prompt. " * 30 + "END?", "chosen": "Yes. " * 4, "rejected": "No."}


def test_cuts_are_as_said_and_counted(tokenizer: HFTokenizer, tmp_path: Path, caplog: Any) -> None:
    rows = [
        {"prompt": "short", "chosen": "a", "rejected": "b"},
        LONG,
        {"prompt": "Say one letter, many times over.", "chosen": "w " * 300, "rejected": "b"},
        {
            "prompt": "Say one letter, many times over.",
            "chosen": "w " * 300,
            "rejected": "w " * 300 + "end",
        },
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    whole = build("preference_dataset", source, tokenizer)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="qfsdp"):
        cut = build("preference_dataset", source, tokenizer, RowLimit(64))
    assert caplog.messages == [
        f"{source}: 3 of 4 pairs are longer than max_seq_len 64: 3 prompts lose their beginning, "
        "2 pairs the end of an answer; 1 left out: their answers differ only after the cut"
    ]
    assert len(cut) == 3 and cut[0] == whole[0]
    for part, (tokens, trained) in enumerate(halves(cut[1])):  # the prompt gives way
        uncut, answer = halves(whole[1])[part]
        assert trained == answer and tokens == uncut[-len(tokens) :]
    assert max(cut[1]["parts"]) == 64
    (tokens, trained), _ = halves(cut[2])  # a prompt keeps half of the slots, the answer the rest
    uncut, answer = halves(whole[2])[0]
    assert len(tokens) == 64 and len(trained) == 32 and trained == answer[:32]
    prompt = uncut[: uncut.index(answer[0], len(uncut) - len(answer) - 2)]
    assert tokens[:32] == prompt[-32:]


def test_cuts_of_packed_pairs(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """One prompt and both answers fit into a row: the prompt gives way first, down to half of it,
    and then each answer keeps half of what is left."""
    ask = "Say one letter, many times over. " * 3
    rows = [LONG, {"prompt": ask, "chosen": "w " * 300, "rejected": "b " * 300}]
    source = write(tmp_path / "rows.jsonl", rows)
    whole = build("preference_dataset", source, tokenizer)
    cut = build("preference_dataset", source, tokenizer, RowLimit(64, packed=True)).dataset
    assert cut.lengths == [64, 64]
    for (_, trained), (_, answer) in zip(halves(cut[0]), halves(whole[0]), strict=True):
        assert trained == answer
    assert [len(trained) for _, trained in halves(cut[1])] == [16, 16]
    for item, uncut in zip(cut, whole, strict=True):
        for (tokens, trained), (before, answer) in zip(halves(item), halves(uncut), strict=True):
            at = before.index(answer[0], len(before) - len(answer) - 2)  # where the answer begins
            prompt = item["shared"] + 1
            assert tokens[:prompt] == before[at - prompt : at]
            assert tokens[prompt : prompt + len(trained)] == trained == answer[: len(trained)]


def test_packed_pairs_have_one_prompt(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """Written out, the documents of a row are the samples of its pairs."""
    source = write(tmp_path / "rows.jsonl", rows_of(12))
    packs = build("preference_dataset", source, tokenizer, RowLimit(256, packed=True))
    for batch in loader(packs, 0, 1, 2, 1, 256).epoch():
        written, ends = batch.documents, batch.documents.cu_seqlens.tolist()
        tokens = batch.tokens.flatten()[written.sources]
        positions = batch.positions.flatten()[written.sources]
        spans = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False) if b > a]
        found = iter([tokens[span].tolist() for span in spans])
        for span in spans:
            assert positions[span].tolist() == list(range(span.stop - span.start))
        for row in batch.samples:
            pairs = [half for index in row for half in halves(packs.dataset[index])]
            for sample, _ in pairs:
                assert next(found) == sample
            slots = sum(packs.dataset.lengths[index] for index in row)
            repeated = sum(packs.dataset[index]["shared"] for index in row)
            assert slots == sum(len(sample) for sample, _ in pairs) - repeated and repeated > 0
            if slots < 256:
                assert len(next(found)) == 256 - slots  # padding


def rows_of(size: int) -> list[dict[str, str]]:
    generator = np.random.default_rng(0)
    words = [" ".join(map(str, range(int(n)))) for n in generator.integers(1, 25, 3 * size)]
    return [
        {
            "prompt": f"{i} {words[i]}",
            "chosen": f"{words[size + i]}.",
            "rejected": f"{words[-i]} no",
        }
        for i in range(size)
    ]


def loader(dataset: Any, rank: int, ranks: int, batch: int, steps: int, limit: int) -> Any:
    return PreferenceLoader(
        dataset,
        batch_size=batch,
        gradient_accumulation_steps=steps,
        rank=rank,
        world_size=ranks,
        seed=1,
        pad_id=0,
        max_seq_len=limit,
    )


def samples_of(batch: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of each sample of a batch, in the order of their numbers."""
    flat, labels = batch.sample_ids.flatten(), batch.labels.flatten()
    tokens = batch.tokens.flatten()
    found = []
    for number in range(batch.num_samples):
        targets = labels[(flat == number) & (labels != -100)].tolist()
        places = ((flat == number) & (labels != -100)).nonzero().flatten().tolist()
        found.append((tokens[places].tolist(), targets))
    return found


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_the_same_batches_for_any_number_of_ranks(
    kind: str, tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    limit = RowLimit(256, packed=kind == "packed")
    source = write(tmp_path / "rows.jsonl", rows_of(29))
    dataset = build("preference_dataset", source, tokenizer, limit)
    items = dataset.dataset if limit.packed else dataset
    whole = [item for i in range(29) for item in halves(items[i])]

    def epoch(ranks: int, batch: int, steps: int) -> list[list[Any]]:
        loaders = [loader(dataset, rank, ranks, batch, steps, 256) for rank in range(ranks)]
        found = []
        for step in range(loaders[0].steps_per_epoch):
            batches = [batch for one in loaders for batch in one.step(step)]
            assert len({len(one.step(step)) for one in loaders}) == 1
            found.append(sorted(pair for b in batches for pair in pairs_of(b)))
        return found

    def pairs_of(batch: Any) -> list[Any]:
        samples = samples_of(batch)
        assert batch.num_pairs * 2 == len(samples)
        rows = batch.sample_ids.max(1).values - batch.sample_ids.min(1).values
        if limit.packed:  # both samples of a pair in one row
            for number in range(0, batch.num_samples, 2):
                places = (batch.sample_ids // 2 * 2 == number) & (batch.labels != -100)
                assert int(places.any(1).sum()) == 1, rows
        return list(zip(samples[::2], samples[1::2], strict=True))

    expected = epoch(1, 6, 1)
    for split in ((1, 1, 6), (2, 3, 1), (3, 1, 2), (6, 1, 1)):
        assert epoch(*split) == expected
    answers = sorted(trained for _, trained in whole)
    assert sorted(targets for step in expected for pair in step for _, targets in pair) == answers


def test_packed_labels_and_mismatches(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 == 0}
        for i, row in enumerate(rows_of(12))
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    packs = build("kto_dataset", source, tokenizer, RowLimit(256, packed=True))
    dataset = packs.dataset
    for data, ranks in ((dataset, 5), (packs, 3), (packs, 20)):
        found: dict[int, Any] = {}
        for rank in range(ranks):
            one = loader(data, rank, ranks, 2, 1, 256)
            for step in range(one.steps_per_epoch):
                for batch in one.step(step):
                    items = [index for row in batch.samples for index in row]
                    other = batch.mismatched
                    assert other.num_samples == batch.num_samples == len(items)
                    assert batch.desirable is not None and batch.num_pairs == 0
                    parts = zip(samples_of(batch), samples_of(other), strict=True)
                    for index, label, both in zip(items, batch.desirable, parts, strict=True):
                        found[index] = (bool(label), both[0][1], both[1][1])
        expected = {
            i: (i % 3 == 0, halves(dataset[i])[0][1], halves(dataset[(i + 1) % 12])[0][1])
            for i in range(12)
        }
        assert found == expected


def test_the_references_numbers_come_with_their_samples(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    source = write(tmp_path / "rows.jsonl", rows_of(7))
    dataset = build("preference_dataset", source, tokenizer)
    known = torch.arange(14, dtype=torch.float32).view(7, 2)
    one = loader(dataset, 0, 1, 4, 1, 256)
    one.reference = known
    for batch in one.step(0) + one.step(1):
        items = [row[0] for row in batch.samples[::2]]
        assert batch.reference_logprobs.tolist() == known[items].flatten().tolist()


def test_tokens_are_kept_uncut(tokenizer: HFTokenizer, tmp_path: Path, caplog: Any) -> None:
    source = write(tmp_path / "rows.jsonl", [*rows_of(5), LONG])
    options = {"tokenized_cache": str(tmp_path / "cache")}
    first = build("preference_dataset", source, tokenizer, **options)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    changed = (folder / "tokens.bin").stat().st_mtime_ns
    second = build("preference_dataset", source, tokenizer, RowLimit(64), **options)
    assert (folder / "tokens.bin").stat().st_mtime_ns == changed
    assert first[0] == build("preference_dataset", source, tokenizer)[0]
    assert max(first[5]["parts"]) > 64 == max(second[-1]["parts"])


def test_mixtures_of_one_kind(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", rows_of(4))
    good = write(tmp_path / "good.jsonl", [{"prompt": "p", "completion": "c", "label": True}] * 2)
    part = {"_component_": "qfsdp.data.preference_dataset", "source": pairs}
    kto = {"_component_": "qfsdp.data.kto_dataset", "source": good}

    def mixed(**sets: Any) -> Any:
        component = Component("qfsdp.data.mixed_dataset", {"sets": sets})
        return build_preferences("dataset", component, tokenizer, None, RowLimit(128))

    assert len(mixed(a=part, b=part | {"max_rows": 1})) == 5
    with pytest.raises(UserError, match="pairs and answers with a label"):
        mixed(a=part, b=kto)
    with pytest.raises(UserError, match="dataset: the label of every row is true"):
        mixed(a=kto)
    held_out = Component("qfsdp.data.kto_dataset", {"source": good})
    key = "validation.sets.held_out"  # a few rows, or the end of a sorted file
    assert len(build_preferences(key, held_out, tokenizer, None, RowLimit(128)))
    with pytest.raises(UserError, match=r"dataset\.sets\.b: .*without preferences"):
        mixed(a=part, b={"_component_": "tests.toy_data.Samples"})


TEXTS = {"prompt": "p", "chosen": "a", "rejected": "b"}
LABELLED = {"prompt": "p", "completion": "c", "label": True}
BAD_DATA = {
    "missing column": ({"prompt": "p", "chosen": "a"}, "no column 'rejected' in"),
    "equal": (TEXTS | {"rejected": "a"}, "1 with chosen and rejected that are equal"),
    "empty answer": (TEXTS | {"rejected": "  "}, "1 with an empty answer"),
    "empty prompt": (TEXTS | {"prompt": None}, "1 with an empty prompt"),
    "not a list": (TEXTS | {"chosen": {"text": "a"}}, "row 1: a message with role None"),
    "pandas' text": (TEXTS | {"chosen": str([GOOD])}, ": not valid JSON: Expecting property name"),
    "nested": (TEXTS | {"chosen": [[["a"]]]}, "row 1: a message that is a list"),
    "roles": (
        TEXTS | {"prompt": [ASK, ASK], "chosen": [GOOD], "rejected": [BAD]},
        "1 with roles that do not alternate",
    ),
    "no answer": (
        TEXTS | {"chosen": [ASK, GOOD, ASK], "rejected": [ASK, BAD]},
        "1 with a prompt that differs from that of its answers",
    ),
    "other prompts": (
        {"prompt": "2 + 2?", "chosen": [ASK, GOOD], "rejected": [BEFORE[0], BAD]},
        "1 with a prompt that differs from that of its answers",
    ),
    "another system message": (
        {"prompt": [{"role": "system", "content": "Be short."}, ASK]}
        | {"chosen": [{"role": "system", "content": "-"}, ASK, GOOD]}
        | {"rejected": [{"role": "system", "content": "-"}, ASK, BAD]},
        "1 with a prompt that differs from that of its answers",
    ),
    "other dialogues": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"},
        "1 with prompts that differ",
    ),
    "no dialogue": ({"chosen": "a", "rejected": "b"}, "1 with text that is no dialogue of Human:"),
    "label": (LABELLED | {"label": "yes"}, "row 1: label: 'yes'; expected true or false"),
    "one label": (LABELLED, "dataset: the label of every row is true; expected true and false"),
    "too long": (
        TEXTS | {"chosen": "w " * 99, "rejected": "w " * 99 + "end"},
        "1 left out: their answers differ only after the cut; expected a larger max_seq_len",
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_line(case: str, tokenizer: HFTokenizer, tmp_path: Path) -> None:
    row, message = BAD_DATA[case]
    source = write(tmp_path / "rows.jsonl", [row])
    builder = "kto_dataset" if "label" in row else "preference_dataset"
    options: dict[str, Any] = {} if "prompt" in row else {"prompt_column": None}
    with pytest.raises(UserError) as error:
        build(builder, source, tokenizer, RowLimit(64, packed=True), **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_configs_are_one_line(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [TEXTS])
    with pytest.raises(UserError, match=r"streaming: true; expected false"):
        build("preference_dataset", source, tokenizer, streaming=True)
    with pytest.raises(UserError, match=r"max_seq_len: 3; expected at least 4"):
        build("preference_dataset", source, tokenizer, RowLimit(3, packed=True))
    plain = write(tmp_path / "sft.jsonl", [{"prompt": "p", "answer": "a"}])
    with pytest.raises(UserError, match="dataset: qfsdp.data.instruct_dataset without preferences"):
        build("instruct_dataset", plain, tokenizer)
    (tmp_path / "rows.pickle").write_bytes(json.dumps(TEXTS).encode())
    with pytest.raises(UserError, match=r"unknown suffix '\.pickle'"):
        build("preference_dataset", str(tmp_path / "rows.pickle"), tokenizer)
