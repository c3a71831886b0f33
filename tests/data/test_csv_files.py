"""CSV and TSV files: cells are text as they stand, and rows that pandas would shift are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from qfsdp.common.errors import UserError
from qfsdp.data import chat_dataset, hf_tokenizer, kto_dataset
from qfsdp.data.files.rows import check_source, load_rows, require_column
from qfsdp.data.reading import Reading, reading

CELLS = [
    *("01234", "NA", "null", "None", "nan", "1e5", "True", "3", "2.50", "", " x ", "a\nb", "a,b"),
    *('say "x"', "é", "-", "=1+1"),
]


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',;\t\n"') else text


def write(file: Path, separator: str = ",", end: str = "\n", mark: str = "") -> Path:
    lines = [separator.join((f"q{at}", quoted(cell))) for at, cell in enumerate(CELLS)]
    text = mark + end.join([f"prompt{separator}answer", *lines, ""])
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "separator", "end", "mark"),
    [
        ("a.csv", ",", "\n", ""),
        ("a.csv", ";", "\r\n", "\ufeff"),  # as Excel writes in half of Europe
        ("a.tsv", "\t", "\n", ""),
        ("a.csv.gz", ",", "\n", ""),
        ("a.tsv.gz", "\t", "\n", ""),
    ],
)
def test_cells_are_text_as_they_stand(
    tmp_path: Path, name: str, separator: str, end: str, mark: str, streaming: bool
) -> None:
    (tmp_path / "folder").mkdir()
    file = write(tmp_path / "folder" / name, separator, end, mark)
    with reading(Reading(streaming=streaming)):
        for source in (file, file.parent):
            check_source("dataset.source", str(source))
            rows = load_rows(str(source), "train")
            found = list(rows.after(0, None)) if streaming else list(rows)
            assert [row["answer"] for row in found] == CELLS
            assert [row["prompt"] for row in found] == [f"q{at}" for at in range(len(CELLS))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q,a\nWhat is 1, 2?,3\n", 'line 2: 3 cells, and the header has 2; expected "quotes"'),
        ('q;a\n"1;2";3\nx;y\n4;5;6\n', "line 4: 3 cells, and the header has 2"),
    ],
)
def test_text_with_separators_needs_quotes(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        check_source("dataset.source", str(tmp_path / "a.csv"))


def test_headers(tmp_path: Path) -> None:
    """Columns without a name and equal ones; files of a folder with other columns."""
    (tmp_path / "a.csv").write_text(",x,x\n0,1,2\n")
    assert list(load_rows(str(tmp_path / "a.csv"), "train")) == [
        {"Unnamed: 0": "0", "x": "1", "x.1": "2"}
    ]
    (tmp_path / "b.csv").write_text("y\n01\n")
    assert list(load_rows(str(tmp_path), "train", data_files="b.csv")) == [{"y": "01"}]
    rows = load_rows(str(tmp_path), "train")
    with pytest.raises(UserError, match=r"answer_column: no column 'x' in .*b\.csv; .* one of y$"):
        require_column("answer_column", "x", rows, str(tmp_path))


def test_lines_of_json_with_gz(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}] * 3
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    check_source("dataset.source", str(tmp_path / "a.jsonl.gz"))
    assert list(load_rows(str(tmp_path / "a.jsonl.gz"), "train")) == rows
    with pytest.raises(UserError, match="has the unknown suffix '.gz'"):
        (tmp_path / "a.tar.gz").write_bytes(b"x")
        check_source("dataset.source", str(tmp_path / "a.tar.gz"))


def test_messages_and_labels_in_cells(tmp_path: Path, smollm2_dir: Path) -> None:
    tokenizer = hf_tokenizer(str(smollm2_dir), max_seq_len=128)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    cell = json.dumps(messages).replace('"', '""')
    (tmp_path / "chats.csv").write_text(f'id,messages\n7,"{cell}"\n')
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    sources = [str(tmp_path / name) for name in ("chats.csv", "chats.jsonl")]
    samples = [chat_dataset(tokenizer, source=source)[0] for source in sources]
    assert samples[0] == samples[1]
    (tmp_path / "kto.csv").write_text("prompt,completion,label\n2+2?,4,True\n2+2?,5,false\n")
    found = kto_dataset(tokenizer, source=str(tmp_path / "kto.csv"))
    assert [sample["desirable"] for sample in found] == [True, False]
    (tmp_path / "kto.csv").write_text("prompt,completion,label\n2+2?,4,yes\n")
    with pytest.raises(UserError, match="label: 'yes'; expected true or false"):
        kto_dataset(tokenizer, source=str(tmp_path / "kto.csv"))
