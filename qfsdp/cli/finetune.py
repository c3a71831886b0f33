"""`qfsdp finetune MODEL ROWS [key=value ...]`: from rows to an adapter in one line.

    MODEL      a model folder, or a name on the hub
    ROWS       a file, a folder of files, or a name on the hub: conversations, prompts with answers,
               preferences or documents
    key=value  any key of the recipe; `--dry-run` only writes the config

It looks at the rows, chooses a recipe and its settings, writes them as a config into the run's
folder, and runs `qfsdp run RECIPE --config CONFIG`. It trains nothing itself: the config is the
run. To change it, copy the config.
"""

# Importing this module imports no torch: words and rows are looked at before.

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote, split
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import long_wait
from qfsdp.common.printable import masked_word
from qfsdp.config import load
from qfsdp.config.component import Component
from qfsdp.config.right_forms import DATA_FILES
from qfsdp.data import PREFERENCES
from qfsdp.hub.download import name_in_address, previewed, split_name

if TYPE_CHECKING:
    from qfsdp.data.row_forms import Form

USAGE = "finetune MODEL ROWS [key=value ...] [--dry-run]"
CONFIG = "finetune.yaml"
TUNING, DPO = "recipes/qdora_distributed", "recipes/dpo_distributed"
# An argument that names a column -> the dataset that has it, for rows of unknown columns.
BUILDERS = {
    "answer_column": "instruct_dataset",
    "messages_column": "chat_dataset",
    "text_column": "text_dataset",
    "chosen_column": "preference_dataset",
    "label_column": "kto_dataset",
}


@dataclass
class Plan:
    """What was chosen.

    Fields:
        recipe: its name.
        tree: the keys of the config.
        lines: what was chosen and why.
    """

    recipe: str
    tree: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.tree["output_dir"]).expanduser()

    def say(self, name: str, line: str) -> None:
        self.lines.append(f"{name:10}{line}")
        print(self.lines[-1], flush=True)

    def write(self) -> Path:
        """Writes the config into the run's folder; its first line runs it."""
        from omegaconf import OmegaConf

        path = self.folder / CONFIG
        above = [f"tune run {self.recipe} --config {quote(str(path))}", *self.lines]
        above.append(f"Keys that are not listed have the defaults of `Config` in {self.recipe}.py.")
        text = "".join(f"# {line}\n" for line in above)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n{OmegaConf.to_yaml(OmegaConf.create(self.tree))}", "utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        return path


def finetune(program: str, words: Sequence[str], run: Callable[[str, Sequence[str]], None]) -> None:
    """Plans a run, writes its config, runs it, and says what to type next.

    Args:
        program: for messages.
        words: behind `finetune`.
        run: runs a recipe: the program, and the words behind `run`.

    Raises:
        UserError: a word, the model or the rows are wrong.
    """
    if {"-h", "--help"} & {*words}:
        return print(f"usage: {program} {USAGE}\n\n{__doc__}".rstrip())
    dry, words = "--dry-run" in words, [word for word in words if word != "--dry-run"]
    model, source, overrides = given_words(program, words)
    written = [word for word in overrides if masked_word(word) == word]
    secrets = [word for word in overrides if word not in written]
    made = plan(model, source, written)
    path = made.write()
    again = f"{program} run {made.recipe} --config {quote(str(path))}"
    print(f"config    {path}; runs by itself with {again}", flush=True)
    if not dry:
        run(program, [made.recipe, "--config", str(path), *secrets])
        print("\n".join(next_words(program, made, again)), flush=True)


def given_words(program: str, words: Sequence[str]) -> tuple[str, str, list[str]]:
    """The model, the rows and the other words; raises UserError."""
    usage = f"expected {program} {USAGE}"
    if len(words) < 2 or any(re.match(r"-|~[^/]|[\w.]+=", word) for word in words[:2]):
        raise UserError(f"{' '.join(['finetune', *map(masked_word, words[:2])])}: {usage}")
    model, source = words[:2]
    folder = Path(model).expanduser()
    if model.endswith(DATA_FILES) and folder.is_file():
        raise UserError(f"MODEL: {model} is a data file; {usage}")
    if not (folder / "config.json").is_file() and (folder.exists() or split_name(model) is None):
        raise UserError(f"MODEL: {model} {_no_model(model, folder)}")
    config, overrides = load.split_words(words[2:], Plan)
    if config is not None:
        expected = f"{program} run RECIPE --config {quote(config)}"
        raise UserError(
            f"--config {config}: finetune writes the config itself; expected {expected}"
        )
    return model, source, overrides


def _no_model(model: str, folder: Path) -> str:
    if (name := name_in_address(model)) is not None:
        return f"is an address; expected the name: {name}"
    if (folder / "adapter_config.json").is_file():
        start = f"adapter.start_from={quote(model)}"
        return f"is an adapter; expected its base, and to go on from the adapter: {start}"
    what = "does not exist"
    if folder.exists():
        what = "is a file" if folder.is_file() else "has no config.json"
    return f"{what}; expected a model folder, or org/model of a hub"


def plan(model: str, source: str, overrides: Sequence[str]) -> Plan:
    """Chooses the recipe and its settings; `overrides` win. Raises UserError."""
    given = dict(word.partition("=")[::2] for word in overrides if not word.startswith("~"))
    check_free(given)
    form = look(source, given)
    print(f"rows      {source}: {form.line if form else 'read as you say'}", flush=True)
    with long_wait("importing PyTorch"):
        from qfsdp.config.recipe_files import find_recipe, load_recipe
        from qfsdp.planning.choices import Choices

        words = split(" ".join(form.words("dataset", Component("")))) if form else []
        builder = form.builder if form else given["dataset._component_"].rpartition(".")[2]
        made = Plan(DPO if builder in PREFERENCES else TUNING, start(model, source))
        file = find_recipe(made.recipe)
        assert file is not None, made.recipe
        recipe = load_recipe(file)
    words += ["loss=kto"] * (builder == "kto_dataset")
    load.change(recipe.Config, made.tree, [*words, *overrides])
    choices = Choices(recipe, made.tree, given, made.say)
    with previewed(choices.config()):
        choices.make()
    return made


def look(source: str, given: Mapping[str, str]) -> Form | None:
    """The form of the rows, of local files without torch; None: `dataset._component_` is given.
    Raises UserError."""
    from qfsdp.data.files.rows import check_source, load_rows, no_column
    from qfsdp.data.row_forms import (
        LOOKED_AT,
        Form,
        first_rows,
        form_of,
        has_splits,
        typical,
        wrapped,
    )

    keys = {key.partition(".")[2]: v for key, v in given.items() if key.startswith("dataset.")}
    check_source("ROWS", source)
    if "_component_" in keys:
        return None
    try:
        rows: Any = first_rows(source)
        if not rows:  # of the hub, or of `save_to_disk`
            where = keys.get("subset"), keys.get("data_files")
            rows = load_rows(source, keys.get("split", "train"), *where, max_rows=LOOKED_AT)
        row = typical(list(rows))
    except UserError as error:
        raise UserError(str(error).replace("dataset.source", "ROWS", 1)) from None
    for key, column in keys.items():
        if key.endswith("_column") and column not in (*row, "null"):
            raise no_column(f"dataset.{key}", column, source, list(row))
    named = next((BUILDERS[key] for key in keys if key in BUILDERS), None)
    form = form_of(row) or (Form("columns that you named", named) if named else None)
    if form is not None and form.read and not keys:
        form.unread = [name for name in row if name not in form.read]
    if form is not None and "data_files" not in keys and has_splits(source):
        form.keys["data_files"] = "**/train*"
    if form is None:
        hint = wrapped(row) or (
            "; expected messages, prompt and answer, prompt with chosen and rejected, or text; or "
            "their names: dataset.prompt_column=NAME dataset.answer_column=NAME"
        )
        raise UserError(f"ROWS: {source} has the columns {', '.join(row)}{hint}")
    return form


def check_free(given: Mapping[str, str]) -> None:
    """Raises UserError if the folder that was named has a run which is not to go on: its config
    would be written over."""
    folder = Path(given.get("output_dir", "")).expanduser()
    is_there = "output_dir" in given and (folder / CONFIG).exists()
    if is_there and "resume" not in given and {*os.listdir(folder)} - {CONFIG}:
        again = f"qfsdp run RECIPE --config {quote(str(folder / CONFIG))} resume=auto"
        raise UserError(
            f"output_dir: {folder} has a run; expected another folder; to go on with it: {again}"
        )


def start(model: str, source: str) -> dict[str, Any]:
    """The keys that depend on nothing else."""
    tokenizer = {"path": "${model.path}", "max_seq_len": "${max_seq_len}"}
    schedule = {"num_warmup_steps": 10, "warmup_ratio": 0.1}
    return {
        "output_dir": free_folder(model, source),
        "resume": None,
        "model": {"path": model},
        "tokenizer": {"_component_": "qfsdp.data.hf_tokenizer"} | tokenizer,
        "dataset": {"_component_": "", "source": source},
        "quantization": {"format": "none"},
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "optimizer": {"_component_": "torch.optim.AdamW", "weight_decay": 0.0, "fused": True},
        "lr_scheduler": {"_component_": "qfsdp.training.cosine_with_warmup"} | schedule,
    }


def free_folder(model: str, source: str) -> str:
    """runs/MODEL-ROWS, or with a number behind it if a run is there already."""
    stem = Path(source).expanduser().resolve().name.partition(".")[0]
    name = f"runs/{Path(model).expanduser().resolve().name.partition('@')[0]}-{stem}"
    number, folder = 1, name
    while os.path.exists(folder) and {*os.listdir(folder)} - {CONFIG}:
        number += 1
        folder = f"{name}-{number}"
    return folder


def next_words(program: str, made: Plan, again: str) -> list[str]:
    """What to type after the run."""
    adapter = made.folder / "adapter"
    if not (adapter / "adapter_config.json").exists():
        return [f"to go on: {again} resume=auto"]
    given, merged = f"adapter={quote(str(adapter))}", quote(str(made.folder / "merged"))
    page = made.folder / "report.html"
    return [
        *([f"page      {page}: losses, memory and time, for a browser"] if page.exists() else []),
        "next:",
        f"  {program} chat {given}",
        f"  {program} serve adapters.mine={quote(str(adapter))}",
        f'  {program} run generate --config generate {given} prompt="..."',
        f"  {program} run merge --config merge {given} output_dir={merged}",
    ]
