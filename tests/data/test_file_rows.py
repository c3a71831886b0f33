"""Rows of files are trained as they are written, whatever the files and columns are called.

The oracle is the text in the files.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import runpy
from array import array
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.data import hf_tokenizer, instruct_dataset, preference_dataset
from qfsdp.data.chat.messages import text_of
from qfsdp.data.files.file_records import JsonLines
from qfsdp.data.files.file_rows import FilePart, FileRows, FileStream, RowStream
from qfsdp.data.files.json_lines import read_rows, value_of
from qfsdp.data.files.rows import check_source, content_digest, load_rows, require_column
from qfsdp.data.preferences.tokenized import RowLimit, build_preferences
from qfsdp.data.pretokenized import text_dataset
from qfsdp.data.reading import Reading, reading
from qfsdp.evaluation.exact_match import ExactMatchConfig, read_questions
from tests.data.test_tokenizer import byte_level, write_folder
from tests.data.tool_templates import HERMES

ROOT = Path(__file__).parents[2]

WRITTEN = ["5", "2.5", "5.00", "1e5", "1E-7", "-0.0", "1e400", "true", "false", "9" * 40, "0.10"]


def lines(file: Path, *texts: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = (text if isinstance(text, str) else json.dumps(text) for text in texts)
    file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return file


def answers(source: Path, **options: Any) -> list[Any]:
    check_source("dataset.source", str(source))
    return [row["a"] for row in load_rows(str(source), options.pop("split", "train"), **options)]


def test_values_are_texts_as_written(tmp_path: Path) -> None:
    texts = [*WRITTEN, '"2024-01-05"', '"01234"', '"2024-01-05T00:00:00Z"', '"a\\u2028\\r\\nb"']
    file = lines(tmp_path / "a.jsonl", *(f'{{"a": {text}}}' for text in texts), '{"a": null}', "{}")
    expected = [*WRITTEN, "2024-01-05", "01234", "2024-01-05T00:00:00Z", "a\u2028\r\nb", "", ""]
    assert list(map(text_of, answers(file))) == expected
    copied = pickle.loads(pickle.dumps(value_of("5.00")))
    assert (str(copied), copied, f"{copied:.1f}", f"{copied}") == ("5.00", 5.0, "5.0", "5.00")
    assert json.dumps(value_of("[5.00]")) == "[5.0]"
    assert text_of(value_of("NaN")) == text_of(float("nan")) == ""


def test_numbers_of_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    narrow = pa.array([0.1, None, 3e-8, 16777216.0], pa.float32())
    half = pa.array([np.float16(0.1), np.float16(2), None, None], pa.float16())
    nested = [{"x": [0.1]}, None, {"x": None}, {"x": [0.2]}]
    kind = pa.struct([("x", pa.list_(pa.float32()))])
    wide = [0.1, float("nan"), 5.0, 1 / 3]
    table = {"a": narrow, "half": half, "deep": pa.array(nested, kind), "wide": wide}
    table["big"] = [2**60 + 1, None, 1, 2]
    parquet.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=3)
    rows = list(load_rows(str(tmp_path / "a.parquet"), "train"))
    assert [text_of(row["a"]) for row in rows] == ["0.1", "", "3e-08", "16777216.0"]
    assert [text_of(row["half"]) for row in rows] == ["0.1", "2.0", "", ""]
    assert [text_of(row["wide"]) for row in rows] == ["0.1", "", "5.0", repr(1 / 3)]
    assert [row["deep"] for row in rows] == nested
    assert text_of(rows[0]["big"]) == str(2**60 + 1)


def test_names_mean_nothing(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", logger="qfsdp")
    folder, outside = tmp_path / "d [1]", lines(tmp_path / "outside.jsonl", {"a": "no"})
    names = ["train.jsonl", "extra.jsonl", "test.JSON", "2023/train/x.jsonl", "val?.jsonl"]
    names += ["e v a l/*.jsonl", "ä.csv", "t.jsonl.gz"]
    for name in names:
        lines(folder / name, *(["a", name] if name.endswith(".csv") else [{"a": name}]))
    (folder / "t.jsonl.gz").write_bytes(gzip.compress((folder / "t.jsonl.gz").read_bytes()))
    lines(folder / ".hidden.jsonl", {"a": "hidden"})
    lines(folder / ".git" / "x.jsonl", {"a": "hidden"})
    lines(folder / "README.md", "---", "configs:", "- config_name: default", "  data_files:")
    with (folder / "README.md").open("a") as card:
        card.write(f'  - split: train\n    path: "{outside}"\n---\n')
    (folder / "loop").symlink_to(folder)
    (folder / "zlink.jsonl").symlink_to(lines(tmp_path / "real", {"a": "link"}))
    assert sorted(answers(folder)) == sorted([*names, "link"])
    said = caplog.records[-1].getMessage()
    assert "reads 9 files: " in said and "; left out: " in said
    for name in (".git (hidden)", ".hidden.jsonl (hidden)", "README.md", "loop (a second way"):
        assert name in said
    assert caplog.records[-1].levelname == "WARNING"  # shown, as README.md is not read
    assert answers(folder, data_files="e v a l/*.jsonl") == ["e v a l/*.jsonl"]
    assert caplog.records[-1].levelname == "INFO"
    assert answers(folder, data_files="val?.jsonl") == ["val?.jsonl"]
    assert answers(folder, data_files="**/x.jsonl") == ["2023/train/x.jsonl"]
    for name in ("../outside.jsonl", str(outside), "none*"):
        with pytest.raises(UserError, match="dataset.data_files: .*no data file of .* this path"):
            answers(folder, data_files=name)
    with pytest.raises(UserError, match="split test: Unknown split .*data_files chooses some"):
        answers(folder, split="test")


def test_a_path_is_no_pattern(tmp_path: Path) -> None:
    for name in ("train[1].jsonl", "train1.jsonl", "t?.jsonl", "tx.jsonl", "*.jsonl"):
        lines(tmp_path / "br" / name, {"a": name})
    for name in ("train[1].jsonl", "t?.jsonl", "*.jsonl"):
        assert answers(tmp_path / "br" / name) == [name]


def test_late_keys_and_types(tmp_path: Path) -> None:
    filler = {"a": "x" * 2000, "b": 1, "c": {"d": 1}}
    late = {"a": 7, "b": "two", "c": [1], "more": 1}
    file = lines(tmp_path / "a.jsonl", *[filler] * 6000, late)
    rows = load_rows(str(file), "train")
    assert len(rows) == 6001 and [*rows.select(range(6000, 6001))] == [late]
    require_column("answer_column", "more", rows, str(file))
    with pytest.raises(UserError, match="no column 'mor' in .*; expected one of a, b, c$"):
        require_column("answer_column", "mor", rows, str(file))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = lines(tmp_path / "d" / "a.jsonl", {"a": "old"})
    before, digest = os.stat(file), content_digest(str(file.parent))
    assert answers(file.parent) == ["old"]
    rows = load_rows(str(file.parent), "train")
    lines(file, {"a": "new"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert answers(file.parent) == ["new"] and content_digest(str(file.parent)) != digest
    with pytest.raises(UserError, match=r"a\.jsonl: changed while it was read"):
        list(rows)


ROWS = [{"a": f"{i} é 😀 " + "x" * (i % 50), "n": [{"k": None}]} for i in range(300)]


def written(folder: Path, kind: str) -> Path:
    file = folder / f"a.{kind.partition(' ')[0]}"
    if kind in ("json list", "json.gz list"):
        text = json.dumps(ROWS, indent=1, ensure_ascii=False)
    elif kind == "json objects":
        text = "\n".join(json.dumps(row, indent=1) for row in ROWS)
    elif "csv" in kind:
        cells = ['"' + row["a"].replace(" ", '""\n') + '",x' for row in ROWS]
        text = "a,n\r\n" + "\r\n\r\n".join(cells)
    else:
        ends = "\r\n\n \r\n" if "blank" in kind else "\n"
        text = "\ufeff" + ends.join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    data = text.encode()
    file.write_bytes(gzip.compress(data) if ".gz" in kind else data)
    return file


KINDS = ["jsonl", "jsonl blank", "jsonl.gz", "json list", "json.gz list", "json objects", "csv"]


@pytest.mark.parametrize("kind", [*KINDS, "csv.gz", "parquet"])
def test_any_part_in_any_order(tmp_path: Path, kind: str) -> None:
    """The same rows as a whole, in pieces, in pieces by other processes, and from any place on."""
    if kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        file, expected = tmp_path / "a.parquet", ROWS
        parquet.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=70)
    else:
        file, expected = written(tmp_path, kind), ROWS
    if "csv" in kind:
        expected = [{"a": row["a"].replace(" ", '"\n'), "n": "x"} for row in ROWS]
    check_source("dataset.source", str(file))
    rows = FileRows([FilePart(file), FilePart(file)])
    assert list(rows) == expected * 2 and len(rows) == 600
    other = pickle.loads(pickle.dumps(rows))
    for start, stop in [(0, 128), (128, 256), (140, 330), (5, 6), (590, 600), (300, 300), (64, 65)]:
        for found in (rows, other):
            part = found.select(range(10, 600)).select(range(start, stop))
            assert list(part) == (expected * 2)[10:][start:stop]
    one, two = iter(rows), iter(rows)
    assert [next(one), next(two), next(one), next(two)] == [
        row for row in expected[:2] for _ in range(2)
    ]
    stream = FileStream([file, file], 500)
    assert list(stream) == (expected * 2)[:500]
    for number in (1, 77, 299, 300, 301):
        stream.load_state_dict({"file": 0, "at": 0, "rows": 0})
        list(islice(stream, number))
        place = json.loads(json.dumps(stream.state_dict()))
        again = FileStream([file, file], 500)
        again.load_state_dict(place)
        assert list(again) == (expected * 2)[number:500]


def test_places_of_an_older_release(tmp_path: Path) -> None:
    file = written(tmp_path, "jsonl")
    stream = RowStream(FileStream([file]), str(file))
    found = stream.after(250, {"examples_iterable": {"shard_idx": 0}, "epoch": 0})
    assert list(found) == ROWS[250:]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 1, "a": 2}\n', "line 3: not valid JSON: the key 'a' twice"),
        ("a.jsonl", '{"a": 1}\n{"a": "\\ud83d"}\n', r"line 2: not valid JSON: '\\ud83d' alone"),
        ("a.jsonl", '{"a": 1}\n{"a": "\0"}\n', "line 2"),
        ("a.jsonl", '{"a": 1}\n{"a": 1} {"a": 2}\n', "line 2: not valid JSON: Extra data"),
        ("a.json", '[{"a": 1},\n{"a": 2},\n]', "line [23]: not valid JSON"),  # 3.13: the comma
        ("a.json", '[{"a": 1},\n{"a": 2}', "line 2: not valid JSON"),
        ("a.json", '[{"a": 1}\n{"a": 2}]', "line 2: not valid JSON"),
        ("a.json", '[{"a": 1},\n3]', "line 2: a number: '3'; expected a JSON object"),
        ("a.json", '[{"a": 1}]\n[]', "line 2: not valid JSON: Extra data"),
        ("a.json", '{"a":\n1}\n{"a"\n1}', "line 4: not valid JSON"),
        ("a.csv", 'a,b\n1,2\n3,"4\n5,6\n', "line 3: a quote that is not closed"),
        ("a.csv", "a,b\n" + f"1,{'x' * 900}\n" * 1200 + "1,2,3\n", "line 1202: 3 cells"),
    ],
)
def test_the_line_of_what_is_wrong(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    for source in (file, tmp_path):
        with pytest.raises(UserError, match=message) as caught:
            answers(source)
        assert "\n" not in str(caught.value)


def test_damage(tmp_path: Path) -> None:
    file = written(tmp_path, "jsonl.gz")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: .*; expected a file that can be read"):
        load_rows(str(file), "train")
    data = bytearray(gzip.compress(b'{"a": 1}\n' * 10**5))
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: "):
        list(load_rows(str(file), "train"))


def test_the_row_of_a_folder_is_named_by_its_line(tmp_path: Path) -> None:
    class Lengths:
        def encode(self, text: str, **_: Any) -> list[int]:
            if text == "wrong":
                raise ValueError("not a text")
            return [1, 2, 3]

    lines(tmp_path / "a.jsonl", {"a": "x"}, {"a": "y"})
    lines(tmp_path / "b.jsonl", {"a": "x"}, "", {"a": "wrong"})
    for streaming in (False, True):
        wrong = pytest.raises(UserError, match=r"row 4 \(.*b\.jsonl, line 3\): not a text")
        with wrong, reading(Reading(tokenized_cache=None, streaming=streaming)):
            found: Any = text_dataset(Lengths(), source=str(tmp_path), text_column="a", window=9)
            found.first()


def test_places_beyond_two_gigabytes(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with file.open("wb") as stream:  # the hole before the row takes no disk
        stream.seek(3 * 2**30)
        stream.write(b'{"a": 2}\n')
    records = JsonLines(file)
    ((at, after, content),) = records.read(3 * 2**30)
    assert (at, after - at, records.value(content, at)) == (3 * 2**30, 9, {"a": 2})
    assert array("q", [at])[0] == at


def test_a_mark_of_utf8_is_no_text(tmp_path: Path) -> None:
    from qfsdp.data.tokenizer_folder import read_text

    for name, text in (("a.txt", "One.\r\nTwo."), ("a.jinja", "{{ 1 }}")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert list(load_rows(str(tmp_path / "a.txt"), "train")) == [{"text": "One.\nTwo."}]
    assert read_text(tmp_path / "a.jinja") == "{{ 1 }}"


CONTEXT: dict[str, Any] = {"system_prompt": "Be brief.", "system_column": "s", "tools_column": "t"}
CONTEXT |= {"history_column": "h"}
TOOLS = [{"name": "add", "parameters": {}}]
BEFORE: tuple[dict[str, Any], ...] = (
    {},
    {"s": "Be kind.", "h": [["a", "b"], ["c", 5]], "t": TOOLS},
    {"s": None, "h": '[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]', "t": ""},
    {"s": 2.5, "t": json.dumps(TOOLS)},
)


def test_what_comes_before_a_prompt_is_the_same_everywhere(tmp_path: Path) -> None:
    """System messages, earlier turns and functions, by the same keys."""
    model = tmp_path / "model"
    model.mkdir()
    write_folder(model, byte_level(), chat_template=HERMES)
    tokenizer = hf_tokenizer(str(model))
    rows = [{"q": "What?", "a": "That.", "b": "No.", **before} for before in BEFORE]
    file = lines(tmp_path / "a.jsonl", *rows)
    columns = {"prompt_column": "q", "answer_column": "a"}
    trained = list(instruct_dataset(tokenizer, source=str(file), **columns, **CONTEXT))
    config = ExactMatchConfig(str(file), "q", "a", compare="text", **CONTEXT)
    asked = [one.prompt for one in read_questions("exact_match.x", config, tokenizer)]
    recipe = runpy.run_path(str(ROOT / "recipes/generate.py"))
    given = SimpleNamespace(prompt_column="q", prompts=str(file), chat_template=True, **CONTEXT)
    assert recipe["tokenized"](given, tokenizer, recipe["rows_of"](given)) == asked
    pairs = {"prompt_column": "q", "chosen_column": "a", "rejected_column": "b"}
    component = Component("qfsdp.data.preference_dataset", {"source": str(file)} | pairs | CONTEXT)
    preferred = build_preferences("dataset", component, tokenizer, None, RowLimit(2048))
    for prompt, sample, pair, before in zip(asked, trained, preferred, BEFORE, strict=True):
        assert sample["tokens"][: len(prompt)] == prompt == pair["tokens"][: len(prompt)]
        assert pair["tokens"][pair["parts"][0] :][: len(prompt)] == prompt
        text = tokenizer.decode(prompt)
        assert text.startswith("system\n") and ("add" in text) == bool(before.get("t"))
    for key in ("system_column", "history_column", "tools_column"):
        with pytest.raises(UserError, match=f"{key}: .*'no'"):
            instruct_dataset(tokenizer, source=str(file), **columns, **(CONTEXT | {key: "no"}))
        with pytest.raises(UserError, match=f"exact_match.x.{key}: no column 'no'"):
            read_questions("exact_match.x", replace(config, **{key: "no"}), tokenizer)


def test_the_same_text_everywhere(tmp_path: Path) -> None:
    """Training, preferences, exact match and generate read one row as the same text."""
    prompts: dict[str, list[str]] = {}

    class Noting:
        """One id per character; keeps the texts of messages."""

        pad_id, max_seq_len, stop_tokens = 0, None, ()

        def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
            texts = [message.text_content for message in sample["messages"]]
            prompts[use] += texts if use != "dpo" else texts[:2]
            tokens = [ord(letter) for letter in "".join(texts)]
            return {"tokens": tokens, "mask": [False] * len(tokens)}

    file = lines(
        tmp_path / "a.jsonl", *(f'{{"q": {text}, "a": {text}, "b": "no"}}' for text in WRITTEN)
    )
    columns = {"prompt_column": "q", "answer_column": "a"}
    for use in ("columns", "template", "dpo", "exact_match", "generate"):
        prompts[use] = []
        if use == "columns":
            instruct_dataset(Noting(), source=str(file), **columns)
        elif use == "template":
            instruct_dataset(Noting(), source=str(file), prompt_template="{q}", answer_column="a")
        elif use == "dpo":
            names = {"prompt_column": "q", "chosen_column": "a", "rejected_column": "b"}
            preference_dataset(Noting(), source=str(file), **names)
        elif use == "exact_match":
            config = ExactMatchConfig(str(file), "q", "a", compare="text")
            questions = read_questions("exact_match.x", config, Noting())
            assert [one.answer for one in questions] == WRITTEN
        else:
            recipe = runpy.run_path(str(ROOT / "recipes/generate.py"))
            given = SimpleNamespace(prompt_column="q", chat_template=True, **dict.fromkeys(CONTEXT))
            recipe["tokenized"](given, Noting(), read_rows("prompts", file, "q"))
    twice = [text for text in WRITTEN for _ in range(2)]
    assert prompts["columns"] == prompts["template"] == twice
    assert prompts["dpo"][::4] == WRITTEN and prompts["dpo"][1::4] == WRITTEN
    assert prompts["exact_match"][::2] == prompts["generate"][::2] == WRITTEN


def test_an_answer_that_is_null(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"q": "x", "a": "y"}, {"q": "x", "a": None})
    config = ExactMatchConfig(str(file), "q", "a", compare="text")
    with pytest.raises(UserError, match="exact_match.x.source: .*row 2: nothing in column 'a'"):
        read_questions("exact_match.x", config, lambda *_, **__: {"tokens": []})


HELD_OUT = [6, 21, 33, 59, 66, 79, 84, 101, 104, 111, 137, 138, 140, 143, 146, 182, 186, 188, 201]
HELD_OUT += [216, 227, 228, 241, 246, 248, 257, 263, 271, 277, 295]


def test_a_shuffled_split_is_the_same_everywhere(tmp_path: Path) -> None:
    """Sorted rows: both parts have rows from everywhere, once each, in the order of the files. The
    numbers stand here because a resumed run has to find them again."""
    lines(tmp_path / "a.jsonl", *({"a": at} for at in range(100)))
    lines(tmp_path / "b.jsonl", *({"a": at} for at in range(100, 300)))
    kept, held = (answers(tmp_path, split=f"train[{part}] shuffled") for part in (":-30", "-30:"))
    assert held == HELD_OUT
    assert kept == sorted({*range(300)} - {*HELD_OUT})
    for split, count in (("train", 300), ("train[:0]", 0), ("train[:10%]+train[50%:]", 180)):
        assert len(answers(tmp_path, split=f"{split} shuffled")) == count
    assert len(answers(tmp_path, split="train[-30:] shuffled", max_rows=4)) == 4


def test_files_of_a_folder_do_not_stay_open(tmp_path: Path) -> None:
    """A folder with more files than a process may open; of some only the first rows are read."""
    for number in range(40):
        lines(tmp_path / f"{number}.jsonl", *({"a": number} for _ in range(1 + number % 3)))
    before = len(os.listdir("/proc/self/fd"))
    rows = [load_rows(str(tmp_path), f"train[{part}] shuffled") for part in (":-20", "-20:")]
    for part in rows:
        assert len(list(part.select(range(9, 18)))) == 9
        assert len(list(part)) == len(part)
    assert len(os.listdir("/proc/self/fd")) - before <= 1


def test_a_shuffled_split_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    def load(source: str, path: Path, split: str, *_: Any) -> Dataset:
        assert split == "test"
        return Dataset.from_dict({"a": list(range(300))})

    monkeypatch.setattr("qfsdp.data.files.rows._load", load)
    assert answers(Path("org/name"), split="test[-30:] shuffled") == HELD_OUT
    with pytest.raises(UserError, match=r"test\+train shuffled: expected a name and a part"):
        load_rows("org/name", "test+train shuffled")
    with reading(Reading(streaming=True)), pytest.raises(UserError, match="is a stream"):
        load_rows("org/name", "test[-30:] shuffled")
