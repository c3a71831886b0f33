"""Which files are recipes, where they are found, and which recipe a config belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfsdp.cli.command import run_command
from qfsdp.common.errors import UserError
from qfsdp.config.recipe_files import (
    DEFAULT_RECIPE,
    find_either,
    find_file,
    find_recipe,
    is_recipe,
    list_files,
    recipe_file_of,
    recipe_of_config,
    runs_something,
    similar_name,
)
from tests.cli.stand_in import ROOT, write_stand_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Config: pass\ndef main(cfg): pass\n", True),
        ("from x import Config, main\n", False),
        ("def main(cfg): pass\n", False),
        ("class Config:\n    def main(self): pass\n", False),
        ("class Config: pass\ndef main(\n", False),
        ("class Config: pass\n\0", False),
    ],
)
def test_a_recipe_defines_config_and_main(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    assert is_recipe(tmp_path / "x.py") == expected


@pytest.mark.parametrize("flags", [(), ("--nproc_per_node", "2")])
def test_a_copy_without_its_last_line(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It did nothing and ended with 0."""
    text = (ROOT / "recipes/merge.py").read_text().partition("if __name__")[0]
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run_command("tune", ["run", *flags, f"{tmp_path}/mine.py", "--config", "merge"])
    assert "mine.py: it starts nothing; expected launch(__file__, " in capsys.readouterr().err


def test_every_shipped_recipe_is_one() -> None:
    recipes = list(ROOT.glob("recipes/*.py"))
    assert recipes and all(map(is_recipe, recipes)) and all(map(runs_something, recipes))
    assert not is_recipe(ROOT / "qfsdp/cli/command.py") and not is_recipe(ROOT / "absent.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# tune run recipes/a --config configs/b.yaml\nx: 1\n", "recipes/a"),
        ("# qfsdp run recipes/a.py --config configs/b.yaml\n", "recipes/a"),
        ("# About recipes/b.\n\n# tune run --nproc_per_node 2 recipes/a --config c\n", "recipes/a"),
        ("x: 1\n# tune run recipes/a\n", None),
        ("# tune run my_recipe --config c.yaml\nx: 1\n", None),
        ("", None),
    ],
)
def test_the_comment_that_names_the_recipe(text: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert recipe_of_config(tmp_path / "c.yaml") == expected


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("recipes", "qdora", "recipes/qdora_distributed"),
        ("recipes", "recipes/qdora_distribute.py", "recipes/qdora_distributed"),
        ("configs", "llama3_8b_qdoar.yaml", "configs/llama3_8b_qdora"),
        ("configs", "configs/gemma3_27", "configs/gemma3_27b_qlora"),
        ("configs", "zzz", None),
        ("configs", "", None),
    ],
)
def test_similar_names(kind: str, name: str, expected: str | None) -> None:
    assert similar_name(kind, name) == expected


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = str(ROOT / "recipes/qdora_distributed.py")
    for name in (DEFAULT_RECIPE, f"./{DEFAULT_RECIPE}.py", f"recipes/../{DEFAULT_RECIPE}"):
        assert find_recipe(name) == find_file(name) == shipped
    assert find_file("configs/generate") == str(ROOT / "configs/generate.yaml")
    assert find_recipe("examples/grpo/train") == str(ROOT / "examples/grpo/train.py")
    job = ROOT / "examples/clusters/qfsdp.sbatch"
    assert find_either("examples/clusters/qfsdp.sbatch") == str(job)
    assert next(iter(list_files("recipes"))) == DEFAULT_RECIPE
    assert find_recipe("recipes/absent") is None and find_file("elsewhere/generate") is None

    write_stand_in(tmp_path, "local")
    local = tmp_path / "recipes/stand_in.py"
    assert find_recipe("recipes/stand_in") == find_recipe(str(local)) == str(local)
    local.rename(tmp_path / "recipes/generate.py")  # the working directory wins
    assert find_recipe("recipes/generate") == str(tmp_path / "recipes/generate.py")


def test_the_file_of_a_configs_recipe(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("x: 1\n")
    assert recipe_file_of(config) == str(ROOT / "recipes/qdora_distributed.py")
    (tmp_path / "recipe.py").write_text("class Config: ...\ndef main(): ...\n")  # as of a run
    assert recipe_file_of(config) == str(tmp_path / "recipe.py")
    config.write_text("# tune run recipes/absent --config c.yaml\n")
    with pytest.raises(UserError, match="its first line names recipes/absent, which does not ex"):
        recipe_file_of(config)
