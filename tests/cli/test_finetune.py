"""`qfsdp finetune`: rows of each form become a config of the right recipe, which then runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfsdp.cli import finetune
from qfsdp.cli.command import run_command
from qfsdp.common.errors import UserError
from qfsdp.config.load import check_components, config_of, load_config, over_defaults
from qfsdp.config.recipe_files import load_recipe, recipe_file_of
from qfsdp.planning import choices
from qfsdp.planning.predict import Prediction
from qfsdp.planning.roofline import StepTime
from tests.cli.stand_in import run
from tests.tiny import write_tiny_model_with_tokenizer
from tests.waiting import LIMIT_S

CHAT = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
TURNS = [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]
# Form -> a row, the builder and its keys.
FORMS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "chats": ({"messages": CHAT}, "chat_dataset", {}),
    "with a system message": (
        {"messages": [{"role": "system", "content": "Be short."}, *CHAT]},
        "chat_dataset",
        {},
    ),
    "sharegpt": ({"conversations": TURNS}, "chat_dataset", {"messages_column": "conversations"}),
    "questions": (
        {"Question": "2 + 3?", "Answer": "5"},
        "instruct_dataset",
        {"prompt_column": "Question", "answer_column": "Answer"},
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "2 + 3", "output": "5"},
        "instruct_dataset",
        {"prompt_template": "{instruction}\n{input}", "answer_column": "output"},
    ),
    "dolly": (
        {"instruction": "Add.", "context": "2 + 3", "response": "5", "category": "sums"},
        "instruct_dataset",
        {"prompt_template": "{instruction}\n{context}", "answer_column": "response"},
    ),
    "summaries": (
        {"article": "A long text.", "summary": "A text."},
        "instruct_dataset",
        {"prompt_column": "article", "answer_column": "summary"},
    ),
    "turns": (
        {"system": "Be short.", "prompt": "And 3 + 4?", "response": "7", "history": [["2?", "2"]]},
        "instruct_dataset",
        {"answer_column": "response", "system_column": "system", "history_column": "history"},
    ),
    "completions": (
        {"prompt": "2 + 3?", "completion": "5"},
        "instruct_dataset",
        {"answer_column": "completion"},
    ),
    "pairs": ({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, "preference_dataset", {}),
    "dialogues": (
        {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "6"}]},
        "preference_dataset",
        {"prompt_column": None},
    ),
    "labels": ({"prompt": "2?", "completion": "2", "label": True}, "kto_dataset", {}),
    "numbers": (
        {"question": "2 + 3?", "answer": 5},
        "instruct_dataset",
        {"prompt_column": "question"},
    ),
    "votes": ({"prompt": "2?", "completion": "2", "label": 1}, "kto_dataset", {}),
    "pairs about inputs": (
        {"instruction": "Add 3.", "input": "2", "chosen": "5", "rejected": "6"},
        "preference_dataset",
        {"prompt_template": "{instruction}\n{input}"},
    ),
    "pairs after a chat": (
        {
            "conversations": [{"from": "human", "value": "2 + 3?"}],
            "chosen": {"from": "gpt", "value": "5"},
            "rejected": {"from": "gpt", "value": "6"},
        },
        "preference_dataset",
        {"prompt_column": "conversations"},
    ),
    "chats and rejected ones": (
        {"messages": CHAT, "rejected_messages": [CHAT[0], {"role": "assistant", "content": "6"}]},
        "preference_dataset",
        {
            "prompt_column": None,
            "chosen_column": "messages",
            "rejected_column": "rejected_messages",
        },
    ),
    "labelled chats": (
        {"messages": CHAT, "label": True},
        "kto_dataset",
        {"prompt_column": None, "completion_column": "messages"},
    ),
    "tags": (
        {"instruction": "Add 3.", "input": "2", "output": "5", "kto_tag": True},
        "kto_dataset",
        {
            "prompt_template": "{instruction}\n{input}",
            "completion_column": "output",
            "label_column": "kto_tag",
        },
    ),
    "ids": ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, "pretokenized_dataset", {}),
    "documents": ({"body": "A text."}, "text_dataset", {"text_column": "body"}),
    "spaces": (
        {"prompt": "2 + 3?", "Response ": "5"},
        "instruct_dataset",
        {"answer_column": "Response "},
    ),
    "odd names": (
        {"system": "Be short.", "@thread: 1": CHAT},
        "chat_dataset",
        {"messages_column": "@thread: 1", "system_column": "system"},
    ),
    "threads": ({"id": 1, "thread": CHAT}, "chat_dataset", {"messages_column": "thread"}),
    "whole": (
        {"instruction": "Add 3.", "input": "2", "output": "5", "prompt": "Do: Add 3.\n2\n5"},
        "instruct_dataset",
        {"prompt_template": "{instruction}\n{input}", "answer_column": "output"},
    ),
}


SERVICES = {
    "google": {
        "systemInstruction": {"parts": [{"text": "Be short."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "2 + "}, {"text": "3?"}]},
            {"role": "model", "parts": [{"text": "5"}]},
        ],
    },
    "openai": {
        "input": {"messages": CHAT[:1]},
        "preferred_output": CHAT[1:],
        "non_preferred_output": [{"role": "assistant", "content": "6"}],
    },
    "ms-swift": {"messages": CHAT, "rejected_response": "6"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    write_tiny_model_with_tokenizer(folder / "tiny", smollm2_dir)
    for name, (row, _, _) in FORMS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 30)
    labels = {"labels": False, "votes": 0, "labelled chats": False, "tags": False}
    for name, bad in labels.items():
        key = "kto_tag" if name == "tags" else "label"
        other = json.dumps(FORMS[name][0] | {key: bad})
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(other + "\n")
    first, rows = FORMS["alpaca"][0] | {"input": None}, (folder / "alpaca.jsonl").read_text()
    (folder / "alpaca.jsonl").write_text(f"{json.dumps(first)}\n{rows.partition(chr(10))[2]}")
    (folder / "text.jsonl").write_text(json.dumps({"messages": json.dumps(CHAT)}) + "\n")
    (folder / "halves.jsonl").write_text(
        json.dumps({"prompt": CHAT[:1], "completion": CHAT[1:]}) + "\n"
    )
    (folder / "odd.jsonl").write_text('{"a": "1", "b": "2"}\n' * 30)
    rows = [FORMS["questions"][0]] * 3
    (folder / "wrapped.json").write_text(json.dumps({"data": rows}))
    (folder / "splits.json").write_text(json.dumps({"test": rows, "train": rows}))
    columns = {name: {"0": "a", "1": "b"} for name in ("question", "answer")}
    (folder / "pandas.json").write_text(json.dumps(columns))
    for name, row in SERVICES.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "lists.jsonl").write_text(json.dumps({"question": "q", "answer": ["a"]}) + "\n")
    return folder


@pytest.fixture
def no_dry_run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    fits = {"quantization.format": "none", "activation.checkpointing": "none"}
    monkeypatch.setattr(choices, "first_fit", lambda *_: (fits, "it fits"))


def read(path: Path) -> Any:
    cfg = load_config(load_recipe(recipe_file_of(path)).Config, ["--config", str(path)])
    check_components(cfg)
    return cfg


@pytest.mark.parametrize("name", FORMS)
def test_rows_become_a_config_of_their_recipe(name: str, no_dry_run: None) -> None:
    _, builder, keys = FORMS[name]
    made = finetune.plan("tiny", f"{name}.jsonl", [])
    path = made.write()
    cfg, of_pairs = read(path), builder in ("preference_dataset", "kto_dataset")
    assert cfg.dataset.path == f"qfsdp.data.{builder}"
    assert hasattr(cfg, "reference_logprobs") is of_pairs
    assert not of_pairs or cfg.loss.path == ("kto" if builder == "kto_dataset" else "sigmoid")
    source = {"source": f"{name}.jsonl"}
    assert cfg.dataset.kwargs == source | keys | {"split": "train[:-3] shuffled"}
    assert cfg.validation.sets["held_out"].kwargs == source | keys | {
        "split": "train[-3:] shuffled"
    }
    assert (cfg.epochs, cfg.global_batch_size, cfg.max_seq_len) == (3, 2, 256)
    assert cfg.output_dir == f"runs/tiny-{name}" and cfg.quantization.format == "none"
    assert 0 < cfg.optimizer.kwargs["lr"] < 0.01


def test_given_keys_stay(no_dry_run: None, capsys: Any) -> None:
    words = ["output_dir=runs/mine", "optimizer.lr=3e-4", "dataset.split=train[:7]", "epochs=2"]
    words += ["batch_size=4", "adapter.rank=8", "max_seq_len=64", "max_steps=3"]
    cfg = read(finetune.plan("tiny", "chats.jsonl", words).write())
    assert cfg.output_dir == "runs/mine" and cfg.optimizer.kwargs["lr"] == 3e-4
    assert cfg.dataset.kwargs["split"] == "train[:7]" and not cfg.validation.sets
    assert (cfg.epochs, cfg.batch_size, cfg.adapter.rank) == (2, 4, 8)
    assert cfg.global_batch_size is None and cfg.max_seq_len == 64
    assert (
        "updates   about 3, 4 rows each, of up to 64 tokens; epochs: 2" in capsys.readouterr().out
    )


def test_given_sections_stay(no_dry_run: None) -> None:
    optimizer = "{_component_: torch.optim.AdamW, lr: 3e-4}"
    words = [f"optimizer={optimizer}", "adapter={rank: 4}", "validation={eval_every: 7}"]
    words.append("output_dir=runs/sections")
    cfg = read(finetune.plan("tiny", "chats.jsonl", words).write())
    assert cfg.optimizer.kwargs == {"lr": 3e-4} and cfg.adapter.rank == 4
    assert cfg.validation.eval_every == 7 and not cfg.validation.sets


def test_a_section_that_is_null_stays(no_dry_run: None) -> None:
    words = ["validation=null", "output_dir=runs/no_validation"]
    cfg = read(finetune.plan("tiny", "chats.jsonl", words).write())
    assert not cfg.validation.sets and "split" not in cfg.dataset.kwargs


def test_columns_that_are_named(no_dry_run: None) -> None:
    words = ["dataset.prompt_column=a", "dataset.answer_column=b"]
    cfg = read(finetune.plan("tiny", "odd.jsonl", words).write())
    assert cfg.dataset.path == "qfsdp.data.instruct_dataset"


def test_a_second_run_gets_a_folder_of_its_own(no_dry_run: None, folder: Path) -> None:
    assert finetune.free_folder("tiny", "x.jsonl") == "runs/tiny-x"
    (folder / "runs/tiny-x/adapter").mkdir(parents=True)
    assert finetune.free_folder("tiny", "x.jsonl") == "runs/tiny-x-2"


def test_a_run_is_not_written_over(no_dry_run: None, folder: Path, capsys: Any) -> None:
    words = ["finetune", "tiny", "chats.jsonl", "output_dir=runs/taken"]
    for _ in range(2):  # a dry run may be repeated
        run_command("qfsdp", [*words, "--dry-run"])
    (folder / "runs/taken/checkpoints").mkdir()
    with pytest.raises(SystemExit):
        run_command("qfsdp", [*words, "--dry-run"])
    assert "error: output_dir: runs/taken has a run; expected another" in capsys.readouterr().err


def test_rows_of_a_test_are_not_trained(no_dry_run: None, folder: Path) -> None:
    """Hub folders have a file for each split; columns that nothing reads are named."""
    (folder / "splits").mkdir()
    for name in ("test", "train-00000-of-00001"):
        row = FORMS["completions"][0] | {"source": name}
        (folder / f"splits/{name}.jsonl").write_text((json.dumps(row) + "\n") * 30)
    made = finetune.plan("tiny", "splits", [])
    assert made.lines[0] == "data      30 rows, of which 3 are held out, by a shuffle"
    assert read(made.write()).dataset.kwargs["data_files"] == "**/train*"
    form = finetune.look("splits", {})
    assert form is not None and form.line.endswith("data_files: **/train*; not read: source")


def test_a_secret_is_not_written(no_dry_run: None, folder: Path) -> None:
    ran: list[str] = []
    words = ["tiny", "chats.jsonl", "output_dir=runs/secret", "metric_logger.api_key=hidden"]
    finetune.finetune("qfsdp", words, lambda _, words: ran.extend(words))
    assert ran[-1] == "metric_logger.api_key=hidden"
    assert "hidden" not in (folder / "runs/secret/finetune.yaml").read_text()


MISTAKES = {  # what is typed behind `finetune` -> a part of the line
    "": "expected qfsdp finetune MODEL ROWS [key=value ...]",
    "tiny": "expected qfsdp finetune MODEL ROWS [key=value ...]",
    "chats.jsonl tiny": "MODEL: chats.jsonl is a data file; expected qfsdp finetune MODEL ROWS",
    "tny chats.jsonl": "MODEL: tny does not exist; expected a model folder",
    ". chats.jsonl": "MODEL: . has no config.json; expected a model folder",
    "tiny chat.jsonl": "ROWS: chat.jsonl does not exist; expected a .jsonl",
    "tiny tiny/tokenizer.model": "ROWS: tiny/tokenizer.model",
    "tiny odd.jsonl": "ROWS: odd.jsonl has the columns a, b; expected messages, prompt and answer",
    "tiny wrapped.json": "inside the list 'data': jq -c '.data[]' FILE",
    "tiny splits.json": "inside the list 'train': jq -c '.train[]' FILE",
    "tiny pandas.json": "pandas wrote columns; expected df.to_json(FILE, orient='records',",
    "tiny lists.jsonl": "'answer' holds a list: ['a']; expected text",
    "tiny https://huggingface.co/datasets/org/rows/tree/main": "expected the name: org/rows",
    "https://huggingface.co/org/model chats.jsonl": "expected the name: org/model",
    "tiny ~/none.jsonl": "ROWS: ~/none.jsonl does not exist",
    "adapter chats.jsonl": "is an adapter; expected its base, and to go on from the adapter: "
    "adapter.start_from=adapter",
    "tiny text.jsonl": "if it is JSON: jq -c '.messages |= fromjson' FILE > rows.jsonl",
    "tiny halves.jsonl": "hold messages: jq -c '.messages = .prompt + .completion' FILE",
    "tiny questions.jsonl dataset.answer_column=anser": (
        "dataset.answer_column: no column 'anser' in questions.jsonl; expected one of Answer"
    ),
    "tiny chats.jsonl --batch_size 4": "overrides are written without dashes: batch_size=4",
    "tiny chats.jsonl batch_size = 4": "overrides are written without spaces: batch_size=4",
    "tiny chats.jsonl --config x.yaml": "expected qfsdp run RECIPE --config x.yaml",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_line(
    typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    (folder / "tiny/tokenizer.model").write_bytes(b"x")
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        run_command("qfsdp", ["finetune", *typed.split()])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and MISTAKES[typed] in line


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize(
    ("name", "form"), [("google", "with a system message"), ("openai", "dialogues")]
)
def test_rows_of_other_services_become_ours(
    name: str, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in the message makes rows of a form that is read."""
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="to have messages: jq") as refused:
        finetune.look(f"{name}.jsonl", {})
    command = str(refused.value).partition("messages: ")[2].replace("FILE", f"{name}.jsonl")
    subprocess.run(command, shell=True, check=True)
    assert json.loads((folder / "rows.jsonl").read_text()) == FORMS[form][0]


@pytest.mark.parametrize(
    ("word", "line"),
    {
        "adapter.rnak=8": "unknown key 'adapter.rnak'; did you mean 'adapter.rank'?",
        "epochs=0": "epochs: 0 is not valid; expected an integer of at least 1",
        "optimizer.lr=fast": "optimizer",
    }.items(),
)
def test_a_wrong_key_is_one_line(word: str, line: str, no_dry_run: None, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run_command("qfsdp", ["finetune", "tiny", "chats.jsonl", word])
    assert line in capsys.readouterr().err


def test_rows_are_looked_at_without_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom qfsdp.cli.command import run_command\n"
        "try: run_command('qfsdp', ['finetune', 'tiny', 'odd.jsonl'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = run(sys.executable, "-c", code, cwd=folder)
    assert done.out == ["False"] and "has the columns a, b" in done.err


@pytest.mark.long
def test_the_whole_run(folder: Path) -> None:
    words = ["tiny", "questions.jsonl", "epochs=1", "global_batch_size=8", "output_dir=runs/whole"]
    command = [sys.executable, "-m", "qfsdp", "finetune", *words]
    how: Any = {"cwd": folder, "env": os.environ | {"QFSDP_EAGER_KERNELS": "1"}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **how)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "  qfsdp chat adapter=runs/whole/adapter" in said
    assert "  qfsdp serve adapters.mine=runs/whole/adapter" in said
    assert any(line.startswith("page      runs/whole/report.html") for line in said)
    columns = "prompt_column: Question; answer_column: Answer"
    assert f"rows      questions.jsonl: prompts with answers; {columns}" in said
    assert (folder / "runs/whole/adapter/adapter_model.safetensors").exists()
    assert "validation/held_out/loss" in (folder / "runs/whole/metrics.jsonl").read_text()


class Sized:
    """A predictor: a step takes 20 GiB with 16-bit weights, and 8 GiB with 4-bit ones."""

    def __init__(self, build: Any, step: Any, cfg: Any, *_: Any) -> None:
        self.size = (20 if cfg.quantization.format == "none" else 8) << 30

    def __call__(self, changes: dict[str, Any]) -> Prediction:
        batch = changes["batch_size"] << 30
        return Prediction(changes, self.size + batch, 0, {}, StepTime(1.0, "compute", {}), 1.0)


@pytest.mark.parametrize(
    ("memory", "format", "batch"), [("30GiB", "none", 4), ("10GiB", "nf4", 2), ("6GiB", "nf4", 1)]
)
def test_weights_have_4_bits_where_16_do_not_fit(
    memory: str, format: str, batch: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(choices, "Predictor", Sized)
    recipe = load_recipe(recipe_file_of("configs/llama3_8b_qlora.yaml"))
    tree = finetune.start("tiny", "chats.jsonl") | {"device_memory": memory}
    cfg = config_of(recipe.Config, "x", over_defaults(recipe.Config, tree))
    found, why = choices.first_fit(recipe, cfg, ["none", "nf4"], 4)
    assert (found["quantization.format"], found["batch_size"]) == (format, batch)
    assert ("nothing that was tried fits" in why) is (memory == "6GiB")
