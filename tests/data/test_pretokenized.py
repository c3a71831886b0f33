"""Rows of token ids: columns, padding, what is refused; from every kind of file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.data import build_dataset, check_dataset, pretokenized_dataset

ROWS = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
    {"input_ids": [4, 5, 0, 0], "labels": [4, 5, -100, -100], "attention_mask": [1, 1, 0, 0]},
    {"input_ids": [0, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [0, 1, 1, 1]},
    {"input_ids": [9, 9], "labels": [9, -100], "attention_mask": [1, 1]},
]
SAMPLES = [([1, 2, 3], [-100, 2, 3]), ([4, 5], [4, 5]), ([6, 7, 8], [-100, 7, 8])]


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def build(source: str, rows: int | None = 10, **more: Any) -> list[tuple[list[int], list[int]]]:
    options = {"source": source, "tokenized_cache": None, **more}
    component = Component("qfsdp.data.pretokenized_dataset", options)
    check_dataset("dataset", component)
    dataset = build_dataset("dataset", component, None, rows)
    return [(dataset[i]["tokens"], dataset[i]["labels"]) for i in range(len(dataset))]


def test_all_kinds_of_files(tmp_path: Path) -> None:
    data = Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "arrow")
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "splits")
    assert build(write(tmp_path, ROWS)) == SAMPLES  # the last row has no target
    assert build(str(tmp_path / "rows.parquet")) == SAMPLES
    assert build(str(tmp_path / "arrow")) == SAMPLES
    assert build(str(tmp_path / "splits")) == SAMPLES
    assert build(str(tmp_path / "splits"), split="test") == SAMPLES[:1]
    with pytest.raises(UserError, match="splits, split valid: no such split; expected one of tra"):
        build(str(tmp_path / "splits"), split="valid")


def test_masks_and_names(tmp_path: Path) -> None:
    rows = [{"tokens": [1, 2, 3], "loss_mask": [0, 0, 1]}, {"tokens": [4, 5], "loss_mask": [1, 1]}]
    assert build(write(tmp_path, rows)) == [([1, 2, 3], [-100, -100, 3]), ([4, 5], [4, 5])]
    plain = [{"ids": [1, 2, 3]}]
    assert build(write(tmp_path, plain), tokens_column="ids") == [([1, 2, 3], [1, 2, 3])]


def test_masks_and_places_of_trl(tmp_path: Path) -> None:
    ids = {"input_ids": [7, 8, 9], "position_ids": [0, 1, 2]}
    masks = {"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}
    assert build(write(tmp_path, [ids | masks])) == [([7, 8, 9], [-100, 8, -100])]
    padded = {"attention_mask": [0, 1, 1], "position_ids": [1, 0, 1]}
    assert build(write(tmp_path, [ids | padded])) == [([8, 9], [8, 9])]
    with pytest.raises(UserError, match=r"row 1: position_ids: \[0, 1, 0\]: several samples; exp"):
        build(write(tmp_path, [ids | {"position_ids": [0, 1, 0]}]))


class Limited:
    max_seq_len = 2


def test_cut(tmp_path: Path) -> None:
    dataset = pretokenized_dataset(Limited(), source=write(tmp_path, [{"tokens": [1, 2, 3]}]))
    assert dataset[0] == {"tokens": [1, 2], "labels": [1, 2]}


GOOD = {"input_ids": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input_ids": [1, 10], "labels": [1, 2]},
            r"row 2: input_ids\[1\]: 10; expected 0 to 9 \(the rows of the model's embedding\)",
        ),
        ({"input_ids": [1, -1], "labels": [1, 2]}, r"row 2: input_ids\[1\]: -1; expected 0 to 9"),
        ({"input_ids": [1, 2], "labels": [-1, 2]}, r"row 2: labels\[0\]: -1; .* or -100"),
        ({"input_ids": [1, 2], "labels": [1]}, "row 2: labels: 1 values; expected 2, one for each"),
        ({"input_ids": None, "labels": [1]}, "row 2: input_ids: a NoneType: 'None'; expected a l"),
    ],
)
def test_wrong_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^dataset.source: .*rows.jsonl, {message}"):
        build(write(tmp_path, [GOOD, row]))


def test_wrong_columns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokens_column: no column 'input_ids' in .*one of text"):
        build(write(tmp_path, [{"text": "a"}]))
    both = [{"input_ids": [1], "labels": [1], "loss_mask": [1]}]
    with pytest.raises(UserError, match="labels and loss_mask; expected one of them"):
        build(write(tmp_path, both))
    middle = [{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}]
    with pytest.raises(UserError, match="row 1: attention_mask: 0 between ones; expected padding"):
        build(write(tmp_path, middle))
    floats = [{"input_ids": [1.5, 2.0]}]
    with pytest.raises(UserError, match=r"row 1: input_ids\[0\]: 1.5; expected an integer"):
        build(write(tmp_path, floats))
