"""Advice before step 1: a line for each thing that small data or a guess spoils, else nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qfsdp.config.component import Component
from qfsdp.data import PackedDataset
from qfsdp.data.preferences.tokenized import PackedPreferences, Preferences
from qfsdp.data.row_tokenizer import TokenizedDataset
from qfsdp.training.advice import advice


def rows(*lengths: int, first: int = 0) -> TokenizedDataset:
    """Samples of these lengths, each of its own token."""
    dataset = TokenizedDataset()
    for token, length in enumerate(lengths, start=first):
        dataset.append([token] * length, [token] * length)
    return dataset


def told(
    dataset: Any,
    held: Any = None,
    total: int = 200,
    batch: int = 8,
    items: Any = None,
    **changes: Any,
) -> list[str]:
    cfg = SimpleNamespace(
        max_seq_len=64,
        max_steps=None,
        epochs=1,
        global_batch_size=None,
        optimizer=Component("torch.optim.AdamW", {"lr": 2e-4}),
        adapter=SimpleNamespace(method="dora"),
    )
    vars(cfg).update(changes)
    loader: Any = SimpleNamespace(dataset=dataset, global_batch_size=batch, items=items)
    return advice(cfg, loader, total, {} if held is None else {"v": held}, 4096).splitlines()


def adamw(lr: float) -> Component:
    return Component("torchao.optim.AdamW8bit", {"lr": lr})


def test_a_usual_run_is_told_nothing() -> None:
    assert told(rows(*range(8, 48)), rows(5, 6, first=100)) == []
    assert told(rows(8, 9), total=3, max_steps=3) == []


@pytest.mark.parametrize(
    ("total", "batch", "words"),
    [(5, 64, "global_batch_size=2 epochs=1"), (12, 1, "epochs=6"), (10, 16, "global_batch_size=1")],
)
def test_few_updates(total: int, batch: int, words: str) -> None:
    (line,) = told(rows(8, 9), total=total, batch=batch)
    assert words.split()[0] in line


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_validation_that_are_trained(packed: bool) -> None:
    trained: Any = rows(*range(8, 20))
    held = rows(8, 9, 30)
    if packed:
        trained, held = PackedDataset(trained, 64, 0), PackedDataset(held, 64, 0)  # type: ignore
    (line,) = told(trained, held)
    assert line.startswith("2 of 3 rows of validation.sets.v are also trained on")
    assert line.endswith("leave the repeats out")
    (line,) = told(rows(8, 9), rows(8, 9))
    assert line.endswith("dataset.split=train[:95%] and train[95%:] divide a file")


def test_answers_of_validation_that_are_trained() -> None:
    pairs = Preferences(rows(8, 9, 10, 11), True, "pairs.jsonl")
    held = Preferences(rows(8, 9, 30, 31), True, "held.jsonl")
    (line,) = told(PackedPreferences(pairs, 64, 0), held, reference="base")
    assert line.startswith("2 of 4 answers of validation.sets.v are also trained on")


def test_a_reference_without_the_start() -> None:
    start = SimpleNamespace(method="lora", start_from="runs/sft/adapter")
    (line,) = told(rows(8, 9), reference="base", adapter=start)
    assert "reference=start" in line
    assert told(rows(8, 9), reference="start", adapter=start) == []


def test_labels_that_are_not_balanced() -> None:
    def lines(*labels: bool, **weights: float) -> list[str]:
        items = SimpleNamespace(desirable=np.array(labels))
        return told(rows(8, 9), items=items, loss=Component("kto", weights))

    assert lines(True, True, False) == lines(True, *[False] * 5, desirable_weight=5.0) == []
    (line,) = lines(True, *[False] * 5)
    assert line.startswith("1 good and 5 bad answers weigh 0.2 to 1") and "loss.desirable" in line
    (line,) = lines(*[True] * 5, False)
    assert line.endswith("loss.undesirable_weight=5 evens them out")


def test_rows_that_lose_their_ends() -> None:
    (line,) = told(rows(*[100] * 5, *[10] * 3, 500))
    assert line.startswith("6 of 9 rows lose their ends; max_seq_len=")
    assert told(rows(*[100] * 3, *[10] * 4)) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"optimizer": adamw(0.1)}, "above"),
        ({"optimizer": adamw(1e-8)}, "below"),
        ({"optimizer": adamw(1e-2), "adapter": SimpleNamespace(method="ia3")}, ""),
        ({"optimizer": adamw(5e-3), "adapter": None}, "above"),
        ({"optimizer": adamw(1e-7), "reference_logprobs": "live"}, ""),
        ({"optimizer": Component("torch.optim.SGD", {"lr": 1.0})}, ""),
    ],
)
def test_a_learning_rate_that_nobody_has_published(changes: dict[str, Any], word: str) -> None:
    lines = told(rows(8, 9), **changes)
    assert [f"is {word} all published rates" in line for line in lines] == [True] * bool(word)
