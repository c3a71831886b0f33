"""The lines before step 1, against numbers that are counted in another way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import qfsdp.training.summary as of_summary
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.config.component import Component
from qfsdp.data import PackedDataset, StepLoader
from qfsdp.data.row_tokenizer import TokenizedDataset
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.launch.preflight_findings import MEMORY, STEP_SECONDS, note_estimates
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.training.summary import (
    COLOUR,
    PLAIN,
    _data,
    sample_pieces,
    shortened,
    summary,
    wrapped,
)
from tests.models import build_meta_model
from tests.tiny import write_tiny_model

WORLD = World(torch.device("cpu"), size=2)


class Letters:
    """Token n is the letter with that code."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


class Texts:
    """Samples of letters; capitals are trained."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.lengths = [len(text) for text in texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = list(map(ord, self.texts[index]))
        return {"tokens": tokens, "mask": [not chr(token).isupper() for token in tokens]}


def loader(dataset: Any, max_seq_len: int = 16) -> StepLoader:
    return StepLoader(
        dataset,
        batch_size=2,
        gradient_accumulation_steps=3,
        rank=0,
        world_size=2,
        seed=0,
        pad_id=0,
        max_seq_len=max_seq_len,
        shuffle=False,
    )


def config(folder: Path) -> Any:
    return SimpleNamespace(
        model=ModelConfig(str(folder)),
        tokenizer=SimpleNamespace(build=Letters),
        sharding=ShardingConfig(),
        lr_scheduler=None,
        max_seq_len=16,
        batch_size=2,
        max_steps=9,
    )


def test_a_run_that_ends_before_max_steps(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    model = build_meta_model(folder, adapter=AdapterConfig(rank=4), dtype="bf16")
    texts = Texts(*["question ANSWER"] * 31)
    for total, more in ((6, " (epochs=3 for max_steps 9)"), (9, "")):
        lines = summary(config(folder), model, loader(texts), WORLD, first=0, total=total)
        assert f"3 per epoch, {total} in all{more}; global batch 12" in lines


def test_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    model = build_meta_model(folder, adapter=AdapterConfig(rank=4), dtype="bf16")
    for name in (MEMORY, STEP_SECONDS):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
    note_estimates("about 1 GiB of 2 GiB per rank", 30.0)
    texts = Texts(*["question ANSWER"] * 30, "x" * 20)
    lines = summary(config(folder), model, loader(texts), WORLD, first=1, total=9).splitlines()
    found = {line.split()[0]: line[10:] for line in lines}

    linears = 2 * (192 * (192 + 2 * 64 + 192) + 3 * 192 * 577) + 577 * 192
    plain = 577 * 192 + 5 * 192
    size, share = linears + plain, linears / (linears + plain)
    expected = f"tiny (llama), {size / 1e9:.3g}B parameters: {share:.0%} nf4, {1 - share:.0%} bf16"
    assert found["model"] == expected
    sides = [(192, 192), (192, 64), (192, 64), (192, 192), (192, 577), (192, 577), (577, 192)]
    trained = 2 * sum(4 * (a + b) + b for a, b in sides)
    expected = f"{trained:,} parameters ({trained / (size + trained):.2%}), "
    assert found["trained"] == f"{expected}{trained * 4 / 1e6:.1f} MB in fp32"
    assert found["data"] == (
        f"31 rows, {30 * 15 + 16} tokens; 1 reach max_seq_len 16, where longer ones are cut"
    )
    split = "batch_size 2 x accumulation 3 x ranks 2"
    assert found["steps"] == f"3 per epoch, 9 in all, 1 of them done; global batch 12 = {split}"
    assert found["memory"] == "about 1 GiB of 2 GiB per rank"
    assert found["time"] == "about 4:00, by the GPU's figures"
    assert found["sample"] == "question [[ANSWER]]"
    assert list(found) == [
        "model",
        "trained",
        "data",
        "steps",
        "device",
        "memory",
        "time",
        "sample",
    ]


@pytest.mark.parametrize(("steps", "told"), [(9, False), (12, True)])
def test_a_warm_up_that_is_longer_than_the_run(tmp_path: Path, steps: int, told: bool) -> None:
    model = build_meta_model(folder := write_tiny_model(tmp_path / "tiny"))
    cfg = config(folder)
    cfg.lr_scheduler = Component("qfsdp.training.cosine_with_warmup", {"num_warmup_steps": steps})
    text = summary(cfg, model, loader(Texts(*["aA"] * 30)), WORLD, first=0, total=9)
    line = f"warm-up   {steps} steps (lr_scheduler.num_warmup_steps), so the learning rate ends at"
    assert (f"{line} about 0.75 of optimizer.lr; " in text) is told


def test_rows_that_teach_nothing_are_told() -> None:
    """Their loss was logged as 0, and no line said why."""
    dataset = TokenizedDataset()
    for prompt in (4, 15, 16, 30):
        dataset.append([7] * 32, [-100] * prompt + [7] * (32 - prompt))
    told = "; 2 have no target within it: nothing is learned from these"
    assert _data(dataset, 16).endswith(f"4 reach max_seq_len 16, where longer ones are cut{told}")
    assert "no target" not in _data(dataset, 32)


def test_packed_data_and_no_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY, "")
    monkeypatch.setenv(STEP_SECONDS, "")
    folder = write_tiny_model(tmp_path / "tiny")
    packed = PackedDataset(Texts("aA", "bB", "cccC", "dddddD"), 8, seed=0)
    model = build_meta_model(folder, adapter=AdapterConfig())
    text = summary(config(folder), model, loader(packed, 8), WORLD, first=0, total=1)
    assert "data      4 rows, 14 tokens; 2 packs, 88% full" in text
    assert not re.search(r"^(memory|time) ", text, re.MULTILINE)
    sample = text.splitlines()[-1].removeprefix("sample    ")
    assert sample in ("dddddD", "ddddd[[D]]", "ccc[[C]]"), "only the first sample of the pack"


def test_the_sample_shows_what_is_trained() -> None:
    batch = loader(Texts("oneTWOthree\nFOUR five")).step(0)[0]
    pieces = sample_pieces(batch, Letters())
    assert pieces == [("one", False), ("TWO", True), ("three\\n", False), ("FOUR", True)]


def test_a_tokenizer_that_cannot_decode(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    cfg = config(folder)
    cfg.tokenizer = SimpleNamespace(build=object)
    model = build_meta_model(folder, adapter=AdapterConfig())
    text = summary(cfg, model, loader(Texts("aA")), WORLD, first=0, total=1)
    assert "sample    not shown: decoding failed (AttributeError: 'object' object has no" in text


def test_a_long_sample_keeps_the_ends_of_its_parts() -> None:
    pieces = [("q" * 900, False), ("A" * 50, True), ("r" * 300, False), ("B" * 900, True)]
    short = shortened(pieces, 400)
    assert sum(len(text) for text, _ in short) <= 400
    assert [trained for _, trained in short] == [False, True, False, True]
    assert short[1] == pieces[1] and all(" ... " in short[at][0] for at in (0, 2, 3))
    many = shortened([("word", at % 2 == 1) for at in range(1000)], 100)
    assert sum(len(text) for text, _ in many) <= 100 and many[-1] == (" ... ", False)
    assert shortened(pieces[1:2], 60) == pieces[1:2]


def test_colours_end_with_each_line() -> None:
    lines = wrapped([("ab", False), ("cdef", True), ("日本", False)], 4)
    assert lines == [f"ab{COLOUR}cd{PLAIN}", f"{COLOUR}ef{PLAIN}日", "本"]


@pytest.mark.parametrize("terminal", [False, True])
def test_names_of_others_are_escaped(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_summary, "is_terminal", lambda: terminal)
    monkeypatch.setattr(of_summary, "columns", lambda: 60)
    line = of_summary._beside("model", "a\x1b[2Jb")
    assert line.split() == ["model", r"a\x1b[2Jb"]
