"""Streams: the same steps for any number of ranks, and from any step on after a resume."""

from __future__ import annotations

import json
from collections import deque
from itertools import islice
from multiprocessing import Pipe, active_children
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.component import Component
from qfsdp.data import (
    StreamLoader,
    build_dataset,
    check_dataset,
    packed,
    step_loader,
    tokenize_processes,
)
from qfsdp.data import stream as stream_module
from qfsdp.training.run_config import check_run_config

SIZE, BUFFER, GLOBAL = 150, 32, 12
TEXTS = [f"{i} " + "x" * (i % 11) for i in range(SIZE)]
TEXTS[40] = ""


class Characters:
    """One id per character."""

    pad_id = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        if text == "wrong":
            raise ValueError("not a text")
        return [ord(c) for c in text]


class Here:
    """`Background` without a process: the work is done when it is asked for."""

    def __init__(self, work: Any) -> None:
        self._work, self._answers = work, deque[Any]()

    def ask(self, *arguments: Any) -> None:
        try:
            self._answers.append(self._work(*arguments))
        except UserError as error:
            self._answers.append(error)

    def answer(self) -> Any:
        found = self._answers.popleft()
        if isinstance(found, UserError):
            raise found
        return found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "Background", Here)


def write(folder: Path, texts: list[str] = TEXTS) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def component(source: str, **more: Any) -> Component:
    options = {"source": source, "window": 16, "streaming": True, "shuffle_buffer": BUFFER}
    return Component("qfsdp.data.text_dataset", {**options, **more})


def loader(
    source: str, rank: int = 0, ranks: int = 1, pack: bool = False, **more: Any
) -> StreamLoader:
    dataset = build_dataset("dataset", component(source, **more), Characters(), 200)
    if pack:
        dataset = packed(dataset, 32, 0)
    found = step_loader(
        dataset,
        batch_size=GLOBAL // ranks // 2,
        gradient_accumulation_steps=2,
        rank=rank,
        world_size=ranks,
        seed=3,
        pad_id=0,
        max_seq_len=32,
    )
    assert isinstance(found, StreamLoader)
    return found


def content(loader: StreamLoader, steps: range) -> list[Any]:
    """All tensors of some steps."""
    return [
        (b.tokens.tolist(), b.labels.tolist(), b.positions is not None, b.samples)
        for step in steps
        for b in loader.step(step)
    ]


def rows_of(batches: list[Any]) -> list[str]:
    return ["".join(map(chr, filter(None, row))) for batch in batches for row in batch[0]]


def test_every_row_once_per_epoch_in_another_order(here: None, tmp_path: Path) -> None:
    one = loader(write(tmp_path))
    usable = [text for text in TEXTS if text]
    rows = list(filter(None, rows_of(content(one, range(30)))))
    first, second = rows[: len(usable)], rows[len(usable) : 2 * len(usable)]
    assert sorted(first) == sorted(second) == sorted(usable)
    assert first != second and first[:BUFFER] != usable[:BUFFER]
    assert sorted(first[:BUFFER]) == sorted(usable[:BUFFER])  # a block is shuffled by itself
    samples = [n for b in content(loader(write(tmp_path)), range(20)) for row in b[3] for n in row]
    assert len(set(samples)) == len(samples) == 20 * GLOBAL  # numbered over all epochs


@pytest.mark.parametrize("pack", [False, True])
def test_ranks_share_the_same_steps(here: None, tmp_path: Path, pack: bool) -> None:
    source, steps = write(tmp_path), range(9)

    def samples(ranks: int) -> list[list[int]]:
        loaders = [loader(source, rank, ranks, pack) for rank in range(ranks)]
        return [
            sorted(n for one in loaders for b in one.step(step) for row in b.samples for n in row)
            for step in steps
        ]

    assert samples(1) == samples(2) == samples(3)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "max_rows"])
@pytest.mark.parametrize("pack", [False, True])
def test_resumed_from_any_step(here: None, tmp_path: Path, pack: bool, kind: str) -> None:
    source, more = write(tmp_path), {}
    if kind == "parquet":
        from datasets import Dataset

        source = str(tmp_path / "rows.parquet")
        Dataset.from_dict({"text": TEXTS}).to_parquet(source, batch_size=20)
    elif kind == "max_rows":
        more = {"max_rows": 100}
    steps = 22
    whole, states = loader(source, pack=pack, **more), []
    progress = whole.keep_in({"other": 1})
    expected = []
    for step in range(steps):
        states.append(json.dumps(progress))
        expected.append(content(whole, range(step, step + 1)))
        assert content(whole, range(step, step + 1)) == expected[-1]  # asked for twice
    for step in (1, 2, 5, 11, 12, 13, 17, 21):
        resumed = loader(source, pack=pack, **more)
        resumed.keep_in({}).update(json.loads(states[step]))
        assert [content(resumed, range(s, s + 1)) for s in range(step, steps)] == expected[step:]
    # Without a checkpoint the stream is read from its beginning.
    assert content(loader(source, pack=pack, **more), range(9, 10)) == expected[9]


def test_resume_tokenizes_one_block(here: None, tmp_path: Path, monkeypatch: Any) -> None:
    source = write(tmp_path)
    one = loader(source)
    progress = one.keep_in({})
    content(one, range(10))  # 120 items: the fourth block
    encoded: list[str] = []
    encode = Characters.encode
    monkeypatch.setattr(
        Characters, "encode", lambda self, text, **k: encoded.append(text) or encode(self, text)
    )
    resumed = loader(source)
    encoded.clear()  # the first block, which every loader asks for when it is made
    resumed.keep_in({}).update(json.loads(json.dumps(progress)))
    resumed.step(10)
    # The step ends in the next block, and the one after that is made ahead.
    assert encoded[0] == TEXTS[3 * BUFFER] and len(encoded) <= 3 * BUFFER


def test_wrong_rows_are_named(here: None, tmp_path: Path) -> None:
    texts = [*TEXTS[:70], "wrong", *TEXTS[70:]]
    late = loader(write(tmp_path, texts))
    with pytest.raises(UserError, match=r"rows\.jsonl, row 71: not a text"):
        content(late, range(10))
    with pytest.raises(UserError, match=r"rows\.jsonl, row 2: not a text"):
        loader(write(tmp_path, ["good", "wrong"]))
    with pytest.raises(UserError, match=r"none of 40 rows can be used \(the last ones: 8 with"):
        loader(write(tmp_path, [""] * 40)).step(0)
    with pytest.raises(UserError, match=r"dataset: sample 2: token id 8364; expected 0 to 199"):
        loader(write(tmp_path, ["good", "\u20ac\u20ac"]))
    with pytest.raises(UserError, match=r"text_column: no column 'body' in .*one of text"):
        loader(write(tmp_path), text_column="body")


def test_keys(tmp_path: Path) -> None:
    source = write(tmp_path)
    with pytest.raises(UserError, match=r"validation.sets.a.streaming: true; expected false"):
        check_dataset("validation.sets.a", component(source))
    mixture = Component("qfsdp.data.mixed_dataset", {"sets": {"a": {}}, "streaming": True})
    with pytest.raises(UserError, match=r"dataset.streaming: true; expected a dataset with one"):
        check_dataset("dataset", mixture)

    class Config:
        batch_size = gradient_accumulation_steps = epochs = log_every_n_steps = 1
        max_seq_len, seed, max_steps, clip_grad_norm = 32, 0, None, None
        dataset = component(source)

    with pytest.raises(InvalidField, match=r"max_steps: None is not valid; expected an integer"):
        check_run_config(Config())


@pytest.mark.long
def test_in_a_process(tmp_path: Path, monkeypatch: Any) -> None:
    source, before = write(tmp_path), {*active_children()}
    real = loader(source)
    expected = content(real, range(15))
    for process in {*active_children()} - before:
        process.kill()
    with pytest.raises(UserError, match="a process that tokenizes was ended from outside"):
        content(real, range(15, 60))
    monkeypatch.setattr(stream_module, "Background", Here)
    assert content(loader(source), range(15)) == expected
    assert len(list(islice(expected, 15))) == 15


@pytest.mark.parametrize("ahead", ["before a request", "before an answer"])
def test_a_process_whose_rank_has_ended_ends_silently(monkeypatch: Any, ahead: str) -> None:
    """The rank may end with requests and answers in the pipe: that resets the connection."""
    mine, theirs = Pipe()
    monkeypatch.setattr(tokenize_processes, "_start_worker", lambda *_: None)
    monkeypatch.setattr(tokenize_processes.signal, "signal", lambda *_: None)
    monkeypatch.setattr(tokenize_processes, "_work", lambda: b"x" * 10, raising=False)
    if ahead == "before an answer":
        mine.send(())
    theirs.send("an answer that nobody reads")
    mine.close()
    tokenize_processes._serve(b"", [], theirs)
