"""The commands and Python of the guides run, in their order, with a tiny model in place of theirs.

A block that needs hardware, a network or minutes says so: `<!-- not run: REASON -->` before it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import ROOT, write_tiny_model_with_tokenizer

GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
LIMIT = 150  # lines beside tables
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
TRAINERS = ("recipes/qdora_distributed", "recipes/full_finetune_distributed", "my_recipe")
SMALL = (
    *("max_seq_len=128", "batch_size=1", "gradient_accumulation_steps=1", "max_steps=2"),
    "lr_scheduler.num_warmup_steps=0",
)
ADAPTERS = {"first": "dora", "a": "lora", "b": "lora"}  # of runs that guides name
ROWS = {
    "my_data.jsonl": {"instruction": "Add.", "input": "2 + 3", "output": "5"},
    "questions.jsonl": {"question": "2 + 3?", "answer": "It is 5"},
    "chats.jsonl": {
        "messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    },
}


def blocks(text: str) -> Iterator[tuple[str, str | None]]:
    """Indented blocks of code, and why they are not run."""
    why, block = None, ""
    for line in [*text.splitlines(), "end"]:
        if line.startswith("    "):
            block += line + "\n"
        elif not line and block:
            block += "\n"
        else:
            if block:
                yield textwrap.dedent(block), why
            found = NOT_RUN.fullmatch(line)
            why, block = (found[1] if found else None if block or line else why), ""


def commands(block: str) -> Iterator[list[str]]:
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith(("tune ", "qfsdp ")):
            yield shlex.split(line)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda file: file.stem)
def test_guides_are_short_and_say_what_is_not_run(guide: Path) -> None:
    text = guide.read_text()
    assert sum(not line.startswith("|") for line in text.splitlines()) <= LIMIT
    for block, why in blocks(text):
        runs = bool(list(commands(block))) or is_python(block)
        shown = re.match(r"[{a-z_]+[:\"]|error|\$ |make test-faults", block)
        assert why or runs or shown, block


def is_python(block: str) -> bool:
    return block.startswith(("from ", "import "))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    """A folder with a tiny model, adapters for it, and data."""
    folder = tmp_path_factory.mktemp("guides")
    write_tiny_model_with_tokenizer(
        folder / "tiny", smollm2_dir, intermediate_size=256, max_position_embeddings=4096
    )
    for name, row in ROWS.items():
        (folder / name).write_text((json.dumps(row) + "\n") * 80)
    first = "run recipes/qdora_distributed --config configs/llama3_8b_qdora.yaml model.path=tiny"
    for name, method in ADAPTERS.items():
        words = ["dataset.source=my_data.jsonl", f"output_dir={name}", f"adapter.method={method}"]
        qfsdp([*first.split(), *words, *SMALL], folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new working folder with the same content; the adapters are where the guides put them."""
    for file in ("tiny", *ROWS):
        (tmp_path / file).symlink_to(made / file)
    for name in ADAPTERS:
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "adapter").symlink_to(made / name / "adapter")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def qfsdp(words: list[str], folder: Path) -> None:
    command = [str(Path(sys.executable).with_name("qfsdp")), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=lambda file: file.stem)
def test_commands_run(guide: Path, folder: Path) -> None:
    if guide.stem == "first-finetune":
        shutil.rmtree(folder / "runs")
    for block, why in blocks(guide.read_text()):
        block = re.sub(r"(meta-llama|Qwen)/[\w.-]+", "tiny", block)
        if why is None and is_python(block):
            exec(block, {})
        for words in () if why else commands(block):
            qfsdp([*words[1:], *small(words)], folder)


def small(words: list[str]) -> tuple[str, ...]:
    """Overrides that make a command of a guide small."""
    if "--help" in words or "--config" not in words:
        return ()
    recipe = words[words.index("--config") - 1]
    if recipe in ("recipes/estimate_memory", "recipes/find_fit"):
        return ("model.path=tiny", "max_seq_len=128")
    if recipe == "recipes/export":
        return ("group_size=64",)
    if recipe == "recipes/sweep":
        cells = "overrides=[model.path=tiny,max_seq_len=128,dataset.source=questions.jsonl]"
        gpu = ["gpu=h100"] if "70b_machines" in str(words) else []  # its points name them
        return (cells, "grid={batch_size: [1]}", "points=[]", "published=null", *gpu)
    if recipe == "recipes/generate":
        return ("sampling.max_new_tokens=4",)
    if recipe == "recipes/evaluate":
        return ("exact_match.arithmetic.max_new_tokens=4", "max_seq_len=128")
    demo = ("model.path=tiny", "dataset.source=questions.jsonl") if "smollm2" in str(words) else ()
    return (*SMALL, *demo) if recipe in TRAINERS else ()
