"""What `--help` says about the keys of a recipe, and where its sentences come from."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from qfsdp.config.component import Component
from qfsdp.config.foreign_keys import foreign_keys
from qfsdp.config.recipe_files import load_recipe
from qfsdp.config.reference import (
    REQUIRED,
    Key,
    component_keys,
    entries,
    help_lines,
    keys_of,
    shown,
)
from tests.cli.stand_in import ROOT

RECIPES = sorted(ROOT.glob("recipes/*.py"))


@dataclass
class Inner:
    """Section `inner`: what is inside. It has two keys.

    A second paragraph.

    Fields:
        a, b: two sizes; the first one
            is the width.
    """

    a: int
    b: int | None = None
    c: Literal["x", "y"] = "x"  # a letter # not a word


@dataclass
class Base:
    path: str  # of a base class


@dataclass
class Schema(Base):
    bare: str = ""
    inner: Inner = field(default_factory=lambda: Inner(3))
    more: dict[str, Inner] = field(default_factory=dict)  # by name
    parts: dict[str, Component] = field(default_factory=dict)
    sizes: list[int] | None = None  # of each
    part: Component = field(default_factory=lambda: Component("torch.optim.SGD"))


def test_keys_of_a_schema() -> None:
    sizes = "two sizes; the first one is the width."
    assert list(keys_of(Schema)) == [
        Key("path", "text", REQUIRED, "of a base class"),
        Key("bare", "text", "", ""),
        Key("inner", "section", None, "what is inside. It has two keys."),
        Key("inner.a", "integer", 3, sizes),  # the default of the field, not of the class
        Key("inner.b", "integer | null", None, sizes),
        Key("inner.c", "x | y", "x", "a letter # not a word"),
        Key("more", "sections by name", {}, "by name"),
        Key("more.NAME.a", "integer", REQUIRED, sizes),
        Key("more.NAME.b", "integer | null", None, sizes),
        Key("more.NAME.c", "x | y", "x", "a letter # not a word"),
        Key("parts", "components by name", {}, ""),
        Key("sizes", "list of integers | null", None, "of each"),
        Key("part", "component", {"_component_": "torch.optim.SGD"}, ""),
    ]


def test_entries_of_torchs_docstrings() -> None:
    text = """Head.

    Args:
        lr (float, Tensor, optional): the rate:
            of all (default: 1)
        eps: small

    Example::
        no: entry
    """
    assert entries(text, "Args:") == {"lr": "the rate: of all (default: 1)", "eps": "small"}
    assert entries(text, "Fields:") == {}


def test_values_as_yaml_writes_them() -> None:
    values = [None, True, [1, "a", False], "", {"_component_": "a.B"}, 1e-05]
    assert [shown(value) for value in values] == [
        "null", "true", "[1, a, false]", '""', "a.B", "1e-05",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_every_key_of_every_recipe_has_a_sentence(recipe: Path) -> None:
    keys = list(keys_of(load_recipe(recipe).Config))
    assert keys and [key.name for key in keys if not key.sentence] == []


def test_help_with_a_config_shows_its_values_and_its_components() -> None:
    recipe = load_recipe(ROOT / "recipes/qdora_distributed.py")
    config = str(ROOT / "configs/llama3_8b_qdora.yaml")
    plain = list(help_lines(recipe, "usage words", [], 80))
    full = list(help_lines(recipe, "usage words", ["--config", config, "adapter.rank=5"], 80))
    assert plain[0] == "usage: usage words"
    assert "  adapter.rank: integer = 16" in plain
    assert "      import path of an optimizer" in plain
    assert "  optimizer.ARGUMENT: what it takes" in plain
    assert "  adapter.rank: integer = 16   (here: 5)" in full
    assert "  optimizer._component_: text, required   (here: torch.optim.AdamW)" in full
    assert any(line.startswith("  optimizer.lr: number | Tensor = 0.001") for line in full)
    assert "  dataset.processes: integer | null = null" in full  # no argument of the builder
    assert not any(line.startswith("  optimizer.params") for line in full)  # the recipe passes it
    assert not any(line.startswith("  epochs") and "here" in line for line in full)  # equal
    wrong = [*("--config", config), "optimizer=torch.optim.AdamX"]
    assert any(
        "'torch.optim.AdamX' does not exist" in line for line in help_lines(recipe, "", wrong, 80)
    )


@pytest.mark.parametrize("words", [["-h"], ["--config", "configs/merge.yaml", "--help"]])
def test_help_of_the_command(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qfsdp.cli.command", "run", "recipes/merge", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("usage: qfsdp run [TORCHRUN-OPTIONS] recipes/merge --config")
    assert "  requantize: none | " in done.stdout
    assert ("(here: " in done.stdout) == (len(words) > 1)


def test_the_page_of_all_keys_is_current() -> None:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.page()
    assert module.PAGE.read_text() == page, "run `python docs/reference.py`"
    others = module.others()
    assert module.OTHERS.read_text() == others, "run `python docs/reference.py`"
    assert all(f"`{key}`" in others for key in foreign_keys().answers)
    assert "| `lora_r` | `adapter.rank` |" in others
    guide = ROOT / "docs/guide/from-axolotl-and-trl.md"
    assert f"all {len(foreign_keys().answers)}]" in guide.read_text()
    assert page.count("* `adapter.rank` (integer, default `16`)") == 1  # of two recipes
    assert page.count("* `epochs` (integer, default `1`): passes over the dataset") == 1
    for recipe in RECIPES:
        for key in keys_of(load_recipe(recipe).Config):
            assert key.type == "section" or f"* `{key.name}` (" in page


def test_arguments_of_a_component_are_explained_where_their_owner_does() -> None:
    """No sentence of ours sends a reader to another function."""
    for name in ("instruct_dataset", "chat_dataset", "text_dataset", "kto_dataset"):
        keys = {key.name: key for key in component_keys(Component(f"qfsdp.data.{name}"), "dataset")}
        assert keys["dataset.split"].sentence.startswith(
            '"train", or a part, such as "train[:95%]"'
        )
        assert keys["dataset.subset"].sentence.startswith("the configuration of a hub dataset")
        assert not [key.name for key in keys.values() if "as in `" in key.sentence]


def test_lines_fit() -> None:
    for file in RECIPES:
        usage = f"qfsdp run [TORCHRUN-OPTIONS] {file} --config CONFIG [key=value ...]"
        lines = list(help_lines(load_recipe(file), usage, [], 100))
        assert max(map(len, lines)) <= 100, max(lines, key=len)
