"""Mixtures of datasets: proportions, order and error messages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qfsdp.checkpoint.compatibility import data_settings
from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.data import check_data, hf_tokenizer, mixed_dataset
from qfsdp.data.loader import StepLoader
from qfsdp.data.mixture import apportion
from qfsdp.data.packing import PackedDataset
from tests.data.test_conversations import PAIRS, texts, write

TOKENIZER = SimpleNamespace(pad_id=0)


def samples(size: int, seed: int) -> dict[str, Any]:
    return {"_component_": "tests.toy_data.Samples", "size": size, "seed": seed}


def mixture(**options: Any) -> Any:
    options = {"sets": {"a": samples(10, 1), "b": samples(50, 2)}} | options
    return mixed_dataset(TOKENIZER, **options)


def counts(dataset: Any) -> list[Counter[int]]:
    """How often each sample occurs, per set."""
    found = [Counter[int](), Counter[int]()]
    for at, index in dataset.chosen.tolist():
        found[at][index] += 1
    return found


def test_every_set_once_without_weights() -> None:
    a, b = counts(mixture())
    assert a == Counter(range(10)) and b == Counter(range(50))


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ({"a": 1, "b": 1}, None, (10, 10)),  # the most without repeating a sample
        ({"a": 0.1, "b": 0.9}, None, (6, 49)),
        ({"a": 3, "b": 1}, 40, (30, 10)),
        ({"b": 2, "a": 1}, 100, (33, 67)),
        (None, 6, (1, 5)),
    ],
)
def test_weights_are_shares_of_the_samples(
    weights: Any, total: int | None, expected: tuple[int, int], caplog: Any
) -> None:
    dataset = mixture(weights=weights, samples=total)
    found = counts(dataset)
    assert tuple(c.total() for c in found) == expected
    assert len(dataset) == sum(expected)
    for count in found:  # counts of samples differ by at most one
        repeats = set(count.values())
        assert max(repeats) - min(repeats) <= 1
    a, b = expected
    assert f"mixture: {a + b} samples: a {a} of 10, b {b} of 50" in caplog.text


def test_items_depend_on_the_sets_and_the_seed_only() -> None:
    dataset, again, other = (mixture(weights={"a": 1, "b": 1}, seed=seed) for seed in (0, 0, 1))
    parts = [
        Component(s.pop("_component_"), s).build(TOKENIZER)
        for s in (samples(10, 1), samples(50, 2))
    ]
    for i, (at, index) in enumerate(dataset.chosen.tolist()):
        assert dataset[i]["tokens"].tolist() == parts[at][index]["tokens"].tolist()
        assert dataset.lengths[i] == len(dataset[i]["tokens"])
    first, second, third = (d.chosen.tolist() for d in (dataset, again, other))
    assert first == second != third
    assert set(dataset.chosen[:8, 0].tolist()) == {0, 1}, "the first samples are a mixture too"
    packs = PackedDataset(dataset, 64, seed=0)
    assert sum(len(packs[i]["lengths"]) for i in range(len(packs))) == len(dataset)


def test_a_resumed_run_must_mix_the_same() -> None:
    """Compares what checkpoints store about the data."""

    def facts(**options: Any) -> dict[str, Any]:
        options = {"weights": {"a": 1, "b": 1}} | options
        split = {"batch_size": 2, "gradient_accumulation_steps": 1, "rank": 0, "world_size": 1}
        loader = StepLoader(mixture(**options), **split, seed=0, pad_id=0, max_seq_len=64)
        return data_settings(loader)

    assert facts() == facts()
    assert facts() != facts(seed=1)
    assert facts() != facts(weights={"a": 1, "b": 2})
    swapped = {"a": samples(10, 2), "b": samples(50, 1)}
    assert facts() != facts(sets=swapped)


def test_apportion() -> None:
    assert apportion({"a": 1, "b": 1, "c": 1}, 10) == {"a": 4, "b": 3, "c": 3}
    assert apportion({"a": 0.1, "b": 0.2, "c": 0.7}, 10) == {"a": 1, "b": 2, "c": 7}
    assert apportion({"a": 1e-9, "b": 1}, 3) == {"a": 0, "b": 3}


def test_each_set_reports_its_own_rows(smollm2_dir: Path, tmp_path: Path, caplog: Any) -> None:
    tokenizer = hf_tokenizer(str(smollm2_dir))
    bad = {"question": "q", "answer": ""}
    maths = write(tmp_path / "maths.jsonl", [{"question": "2+2?", "answer": "4"}] * 3 + [bad])
    pairs = write(tmp_path / "pairs.jsonl", PAIRS)
    sets = {
        "maths": {"_component_": "qfsdp.data.gsm8k_dataset", "source": maths},
        "pairs": {"_component_": "qfsdp.data.instruct_dataset", "source": pairs},
    }
    dataset = mixed_dataset(tokenizer, sets=sets)
    assert len(dataset) == 9
    answers = {texts(tokenizer, dataset, index)[1] for index in range(9)}
    assert answers >= {"4<|im_end|>", "It is 6.<|im_end|>"}
    assert "maths.jsonl: 3 of 4 rows used" in caplog.text
    assert "1 with an empty answer" in caplog.text
    sets["pairs"]["answer_column"] = "anser"
    with pytest.raises(UserError, match=r"^dataset\.sets\.pairs\.answer_column: no column 'anser'"):
        mixed_dataset(tokenizer, sets=sets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"a": 1}}, "dataset.weights: {'a': 1}; expected one for each of a, b"),
        ({"weights": {"a": 1, "b": 0}}, "dataset.weights.b: 0; expected a number above 0"),
        ({"weights": {"a": 1, "b": "x"}}, "dataset.weights.b: 'x'; expected a number above 0"),
        ({"samples": 0}, "dataset.samples: 0; expected an integer of at least 1"),
        ({"sets": {}}, "dataset.sets: {}; expected a mapping of names to datasets"),
        ({"sets": {"a": {"size": 3}}}, "dataset.sets.a._component_ is required"),
    ],
)
def test_faulty_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        mixture(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_faulty_nested_sets_are_found_before_reading(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", PAIRS)
    tokenizer = Component("qfsdp.data.hf_tokenizer", {"path": "."})

    def check(validation: bool = False, **changes: Any) -> None:
        part = {"_component_": "qfsdp.data.instruct_dataset", "source": good} | changes
        nested = {"_component_": "qfsdp.data.mixed_dataset", "sets": {"x": part}}
        dataset = Component("qfsdp.data.mixed_dataset", {"sets": {"inner": nested}})
        plain = Component("qfsdp.data.instruct_dataset", {"source": good})
        check_data(tokenizer, *((plain, {"held": dataset}) if validation else (dataset, {})))

    check()
    with pytest.raises(UserError, match=r"^dataset\.sets\.inner\.sets\.x\.source: no\.csv does"):
        check(source="no.csv")
    with pytest.raises(UserError, match="takes no argument 'sorce'; did you mean 'source'"):
        check(sorce="x")
    where = r"^validation\.sets\.held\.sets\.inner\.sets\.x\.source: no\.csv does not exist"
    with pytest.raises(UserError, match=where):
        check(validation=True, source="no.csv")
