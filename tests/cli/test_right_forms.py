"""What is often typed wrong: one line that has the right form, and exit status 2."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfsdp import __version__
from qfsdp.cli.command import run_command
from qfsdp.config.right_forms import no_recipe
from tests.tiny import ROOT, write_tiny_model

CONFIG = "configs/llama3_8b_qdora.yaml"
TRAIN = f"run recipes/qdora_distributed --config {CONFIG} model.path=tiny max_seq_len=64 "
CHAT = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
ROWS = {
    "chats": {"messages": CHAT},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "2"}]
    },
    "questions": {"question": "2 + 3?", "answer": "5"},
    "alpaca": {"instruction": "Add.", "input": "2 + 3", "output": "5"},
    "pairs": {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    "documents": {"text": "A text."},
}
INSTRUCT = "dataset._component_=qfsdp.data.instruct_dataset"
MISTAKES = {  # what is typed -> parts of the line
    f"{TRAIN} dataset=questions.jsonl": "expected dataset.source=questions.jsonl",
    f"{TRAIN} validation.sets.v=questions.jsonl": (
        "expected validation.sets.v._component_=qfsdp.data.instruct_dataset "
        "validation.sets.v.source=questions.jsonl"
    ),
    f"{TRAIN} adapter.targets=q_proj,v_proj": "expected 'adapter.targets=[q_proj,v_proj]'",
    f"{TRAIN} --batch_size 4": "overrides are written without dashes: batch_size=4",
    f"{TRAIN} --batch_size=4": "overrides are written without dashes: batch_size=4",
    f"{TRAIN} batch_size = 4": "overrides are written without spaces: batch_size=4",
    f"{TRAIN} batch_size =4": "overrides are written without spaces: batch_size=4",
    f"{TRAIN} questions.jsonl": "dataset.source=questions.jsonl",
    f"{TRAIN} --nproc_per_node 2": (
        "expected qfsdp run --nproc_per_node 2 recipes/qdora_distributed --config "
    ),
    f"{TRAIN} --nproc-per-node=2 seed=1": "max_seq_len=64 seed=1",
    "run configs/llama3_8b_qdora.yaml": (
        "expected qfsdp run recipes/qdora_distributed --config configs/llama3_8b_qdora.yaml"
    ),
    f"run --config {CONFIG} seed=1": f"qfsdp run recipes/qdora_distributed --config {CONFIG}",
    f"run --nproc_per_node 2 --config={CONFIG} seed=1": f"_distributed --config {CONFIG}",
    "run recipes/merge -c other.yaml": "a config is given as --config other.yaml",
    "run recipes/merge other.yaml": "a config is given as --config other.yaml",
    "run recipes/lora": "did you mean 'recipes/qdora_distributed'?",
    "run recipes/qlora.py": "did you mean 'recipes/qdora_distributed'?",
    "run recipes/dpo": "did you mean 'recipes/dpo_distributed'?",
    "run recipes/kto": "did you mean 'recipes/dpo_distributed'?",
    "run recipes/full": "did you mean 'recipes/full_finetune_distributed'?",
    "run recipes/eval": "did you mean 'recipes/evaluate'?",
    "run recipes/grpo": "GRPO is an example: qfsdp run examples/grpo/train.py --config ",
    "run": "expected qfsdp run [TORCHRUN-OPTIONS] RECIPE --config CONFIG",
    "trian": "expected run, finetune, chat, serve, doctor, ls, cp, cat, validate",
    "fintune": "did you mean 'finetune'?",
    "merge adapter=x": "expected qfsdp run recipes/merge --config configs/merge.yaml",
    "eval": "expected qfsdp run recipes/evaluate --config configs/evaluate.yaml",
    "train": "expected qfsdp finetune MODEL ROWS or qfsdp run recipes/qdora_distributed --config ",
    "": "no command given; expected one of run, finetune, chat, serve, doctor, ls, cp, cat, ",
    "cp": "the following arguments are required: file, destination",
    "chat runs/x/adapter": "adapter=runs/x/adapter",
    "chat tiny": "model.path=tiny",
    "serve runs/x/adapter": "adapters.NAME=runs/x/adapter",
    f"{TRAIN} dataset.source=chats.jsonl": (
        "these are conversations: dataset._component_=qfsdp.data.chat_dataset"
    ),
    f"{TRAIN} dataset.source=sharegpt.jsonl": "dataset.messages_column=conversations",
    f"{TRAIN} dataset.source=questions.jsonl": "dataset.prompt_column=question",
    f"{TRAIN} {INSTRUCT} dataset.source=alpaca.jsonl ~dataset.prompt_template": (
        r"""'dataset.prompt_template="{instruction}\n{input}"'"""
    ),
    f"{TRAIN} dataset.source=pairs.jsonl": "these are preference pairs: ",
    f"{TRAIN} dataset.source=documents.jsonl": "dataset._component_=qfsdp.data.text_dataset",
    f"{TRAIN} dataset.source=wrapped.json": "inside the list 'data': jq -c '.data[]' FILE",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    write_tiny_model(folder / "tiny")
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 3)
    (folder / "wrapped.json").write_text(json.dumps({"data": [ROWS["questions"]] * 3}))
    return folder


def told(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """The only line of a command that ends with status 2."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["qfsdp", *words])
    with pytest.raises(SystemExit) as ended:
        run_command("qfsdp", words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return str(line)


@pytest.mark.parametrize("typed", MISTAKES, ids=lambda typed: typed.replace(TRAIN, ""))
def test_the_line_has_the_right_form(
    typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert MISTAKES[typed] in told(typed.split(), folder, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["chats", "sharegpt", "questions", "alpaca", "documents"])
def test_the_words_of_the_line_are_right(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Typed as they stand, in a shell, they get as far as the missing tokenizer."""
    words = [*TRAIN.split(), f"dataset.source={name}.jsonl", "dataset.answer_column=x"]
    line = told(words, folder, monkeypatch, capsys)
    more = shlex.split(line.partition("; these are ")[2].partition(": ")[2])
    assert more and "tokenizer" in told([*words, *more], folder, monkeypatch, capsys)


def test_the_version_of_python_m_qfsdp() -> None:
    words = [sys.executable, "-m", "qfsdp", "--version"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == f"qfsdp {__version__}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Config: ...\nif:\n", "mine.py, line 2: not valid Python: invalid syntax; expected"),
        ("class Config: ...\n", "mine.py: defines no main; expected a recipe: Config and main"),
        ("", "mine.py: defines no Config and no main; expected"),
    ],
)
def test_a_wrong_copy_of_a_recipe(text: str, message: str, tmp_path: Path) -> None:
    """It was "no such recipe"."""
    file = tmp_path / "mine.py"
    file.write_text(text)
    for name in (str(file), str(file).removesuffix(".py")):
        assert message in no_recipe("qfsdp", name)
