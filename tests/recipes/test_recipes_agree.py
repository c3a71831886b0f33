"""Functions of the same name are the same in both training recipes, except those listed here."""

from __future__ import annotations

import ast

from tests.tiny import ROOT

RECIPES = ("qdora_distributed", "full_finetune_distributed")
DIFFERENT = {
    "check": "an adapter's start is checked, and a packed copy may be made before a disk is read",
    "build_model": "adapters are added to a frozen model, or some of its weights are trained",
    "load_model": "adapters get their start; a packed copy of the folder is kept for later runs",
    "main": "what is saved is an adapter or a model; updates may happen within backward",
}


def functions(recipe: str) -> dict[str, str]:
    """Function name -> source, without comments and layout."""
    tree = ast.parse((ROOT / f"recipes/{recipe}.py").read_text())
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_functions_of_the_same_name_are_the_same() -> None:
    one, other = map(functions, RECIPES)
    assert {"train_step", "build_loader"} <= one.keys() & other.keys()
    different = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    assert different == DIFFERENT.keys()
