"""Tokenized datasets on disk: made once, by any number of processes, used only if nothing changed.

The oracle is `text_dataset` called directly, which tokenizes in this process and keeps nothing.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.data import build_dataset, check_dataset, text_dataset
from qfsdp.data.packing import PackedDataset
from qfsdp.data.tokenized_dataset import TokenizedDataset
from tests.disk_limits import largest_file
from tests.flips import flip
from tests.waiting import LIMIT_S


class Characters:
    """A tokenizer with one id per character. It notes the character "#" as a special token."""

    pad_id = 0

    def __init__(self, fingerprint: str = "characters", wait_at: str = "") -> None:
        self.fingerprint, self.spelled, self.wait_at = fingerprint, list[str](), wait_at
        self.encoded = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        self.encoded += 1
        if text == "wrong":
            raise ValueError("not a text")
        if "#" in text:
            self.spelled.append(f"'#' in {text}")
        if self.wait_at and self.wait_at in text:
            print("waits", flush=True)
            sys.stdin.readline()
        return [ord(c) % 1000 + 1 for c in text]


TEXTS = [f"row {i} of many" + " and more" * (i % 7) for i in range(700)]
TEXTS[300], TEXTS[301], TEXTS[450], TEXTS[650] = "", "# first", " ", "another #"


def write(folder: Path, texts: list[str] = TEXTS) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def build(source: str, cache: Path, tokenizer: Any = None, **more: Any) -> TokenizedDataset:
    options = {"source": source, "window": 32, "tokenized_cache": str(cache), **more}
    component = Component("qfsdp.data.text_dataset", options)
    dataset = build_dataset("dataset", component, tokenizer or Characters(), 2000)
    assert isinstance(dataset, TokenizedDataset)
    return dataset


def content(dataset: TokenizedDataset) -> tuple[list[int], list[int], list[int]]:
    return dataset.tokens.tolist(), dataset.labels.tolist(), dataset.ends.tolist()


def lines(caplog: Any) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "qfsdp"]
    caplog.clear()
    return found


def test_the_code_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 35 ms for each of perhaps 1,000 held-out sets."""
    source, read, real = write(tmp_path), list[Path](), Path.read_bytes
    build(source, tmp_path / "cache")
    monkeypatch.setattr(Path, "read_bytes", lambda file: read.append(file) or real(file))
    build(source, tmp_path / "cache", window=16)
    assert sum(file.suffix == ".py" for file in read) == 1  # the builder's


def test_many_datasets_are_mapped(tmp_path: Path) -> None:
    """A mapped file stays open: a run with 340 held-out sets ended with too many open files."""
    source, limits = write(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 20, limits[1]))
        kept = [build(source, tmp_path / "cache", window=window) for window in range(20, 32)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(isinstance(dataset.tokens, np.memmap) for dataset in kept)


def test_second_start_maps_the_files(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="qfsdp")
    source, tokenizer = write(tmp_path), Characters()
    serial = text_dataset(Characters(), source=source, window=32)
    said = lines(caplog)
    assert "698 of 700 rows used" in said[0] and "left out: 2 with no text" in said[0]
    assert "2 texts spell special tokens, first in row 302: '#' in # first" in said[1]

    first = build(source, tmp_path / "cache", tokenizer)
    assert tokenizer.encoded == 698 and lines(caplog) == said
    second = build(source, tmp_path / "cache", tokenizer)
    assert tokenizer.encoded == 698 and lines(caplog) == said  # the counts are kept as well
    for dataset in (first, second):
        assert content(dataset) == content(serial)
        assert isinstance(dataset.tokens, np.memmap) and dataset[-1] == serial[-1]
    packs, same = (PackedDataset(data, 64, 0) for data in (second, serial))
    assert [packs.samples(i) for i in range(len(packs))] == [
        same.samples(i) for i in range(len(same))
    ]
    # The range of the ids is kept too, and a model with fewer rows is refused.
    component = Component(
        "qfsdp.data.text_dataset",
        {"source": source, "window": 32, "tokenized_cache": str(tmp_path / "cache")},
    )
    with pytest.raises(UserError, match="dataset: sample 1: token id .* expected 0 to 49"):
        build_dataset("dataset", component, tokenizer, 50)


def test_whatever_changes_is_tokenized_again(tmp_path: Path) -> None:
    source, cache = write(tmp_path), tmp_path / "cache"
    build(source, cache)

    def is_made_again(**changes: Any) -> bool:
        tokenizer = changes.pop("tokenizer", None) or Characters()
        build(source, cache, tokenizer, **changes)
        return bool(tokenizer.encoded)

    assert not is_made_again()
    assert not is_made_again(processes=1)  # decides nothing
    assert is_made_again(window=31)
    assert is_made_again(max_rows=600)
    assert is_made_again(tokenizer=Characters("another"))
    before = os.stat(source)
    changed = Path(source).read_text().replace("row 5 of", "row 5 on")
    Path(source).write_text(changed)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # same time, same size
    tokenizer = Characters()
    found = build(source, cache, tokenizer)
    assert tokenizer.encoded
    assert content(found) == content(text_dataset(Characters(), source=source, window=32))


@pytest.mark.parametrize("damage", ["cut", "no summary", "no folder name"])
def test_damaged_cache_is_not_used(tmp_path: Path, damage: str) -> None:
    source, cache = write(tmp_path), tmp_path / "cache"
    expected = content(build(source, cache))
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    if damage == "cut":
        os.truncate(folder / "labels.bin", 100)
    elif damage == "no summary":
        (folder / "summary.json").unlink()
    else:  # a process that was killed before the rename
        os.truncate(folder / "labels.bin", 100)
        folder.rename(folder.with_name(folder.name + ".partial"))
    tokenizer = Characters()
    assert content(build(source, cache, tokenizer)) == expected and tokenizer.encoded
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


def test_a_flip_in_any_file_is_noticed(tmp_path: Path, capsys: Any) -> None:
    source, cache, chance = write(tmp_path, TEXTS[:40]), tmp_path / "cache", random.Random(0)
    expected = content(build(source, cache))
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["ends.bin", "labels.bin", "summary.json", "tokens.bin"]
    for number in range(52):
        name = names[number % 4]
        how = f"{name}: {flip(chance, folder / name)}"
        tokenizer = Characters()
        assert content(build(source, cache, tokenizer)) == expected and tokenizer.encoded, how
        told = capsys.readouterr().err.strip()
        assert told.startswith(f"warning: tokenized_cache: '{folder}' is damaged: {name}"), how
        assert "\n" not in told
    assert content(build(source, cache)) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["full", "no folder"])
def test_without_a_disk_it_goes_on_in_memory(tmp_path: Path, kind: str, capsys: Any) -> None:
    source, cache = write(tmp_path), tmp_path / "cache"
    expected = content(text_dataset(Characters(), source=source, window=32))
    if kind == "full":  # in the middle of the work: its files have 100 KB then
        with largest_file(20_000):
            dataset = build(source, cache)
    else:
        cache.write_text("a file")
        dataset = build(source, cache)
    assert content(dataset) == expected
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be written" in said and str(cache) in said
    assert not cache.is_dir() or not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.long
def test_processes_give_the_same(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="qfsdp")
    source = write(tmp_path)
    expected = content(text_dataset(Characters(), source=source, window=32))
    said = lines(caplog)
    assert content(build(source, tmp_path / "cache", processes=3)) == expected
    assert lines(caplog) == said
    texts = list(TEXTS)
    texts[200], texts[500] = "wrong", "wrong"
    source = write(tmp_path, texts)
    with pytest.raises(UserError, match=r"rows\.jsonl, row 201: not a text"):
        build(source, tmp_path / "cache", processes=3)
    assert not list((tmp_path / "cache").glob("*.partial"))


PROGRAM = """
import sys
from pathlib import Path
from tests.data.test_token_cache import Characters, build, content
tokenizer = Characters(wait_at=sys.argv[3])
dataset = build(sys.argv[1], Path(sys.argv[2]), tokenizer)
print(tokenizer.encoded, hash(str(content(dataset))), flush=True)
"""


def start(source: str, cache: Path, wait_at: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, source, str(cache), wait_at],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_killed_and_two_at_once(tmp_path: Path) -> None:
    source, cache = write(tmp_path), tmp_path / "cache"
    killed = start(source, cache, "row 600 of")
    assert killed.stdout is not None and killed.stdout.readline() == "waits\n"
    assert list(cache.glob("*.partial"))
    killed.kill()
    killed.wait()

    first = start(source, cache, "row 600 of")
    assert first.stdout is not None and first.stdout.readline() == "waits\n"
    second = start(source, cache, "row 600 of")
    assert second.stderr is not None
    assert "waiting for another process that tokenizes" in second.stderr.readline()
    made, kept = (p.communicate("\n", timeout=LIMIT_S)[0].split() for p in (first, second))
    assert made[0] == "698" and kept[0] == "0" and made[1] == kept[1]


def test_keys_are_checked(tmp_path: Path) -> None:
    source = write(tmp_path)
    for name, value, expected in (
        ("processes", 0, "expected an integer from 1 to 64, or null"),
        ("tokenized_cache", 3, "expected auto, a folder, or null"),
        ("shuffle_buffer", "many", "expected an integer from 1 to 10000000"),
    ):
        component = Component("qfsdp.data.text_dataset", {"source": source, name: value})
        with pytest.raises(UserError, match=f"dataset.{name}: .*{expected}"):
            check_dataset("dataset", component)
