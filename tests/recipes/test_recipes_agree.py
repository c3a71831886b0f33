"""Functions of the same name are the same in all training recipes, except those listed here."""

from __future__ import annotations

import ast

import pytest

from tests.tiny import ROOT

FIRST = "qdora_distributed"
DIFFERENT = {
    "full_finetune_distributed": {
        "check": "an adapter's start is checked, and a packed copy may be made before a disk is "
        "read",
        "build_model": "adapters are added to a frozen model, or some of its weights are trained",
        "load_model": "adapters get their start; a packed copy of the folder is kept for later",
        "train_step": "steps of adapters may be CUDA graphs",
        "main": "what is saved is an adapter or a model; updates may happen within backward",
    },
    "dpo_distributed": {
        "check": "prompts that pairs share stand once in a packed row, where some kinds of rotary "
        "positions cannot be computed",
        "build_model": "the adapters' start may be kept, for the reference",
        "build_loader": "samples are pairs, or answers with a label",
        "train_step": "the loss compares answers, with a reference's pass before it",
        "main": "an update is told what to minimize",
    },
    "reward_distributed": {
        "check": "packed pairs are as in dpo_distributed",
        "build_model": "a score head takes the place of the output layer",
        "build_loader": "samples are pairs, or texts with a class",
        "train_step": "the loss compares scores",
        "main": "an update is told what to minimize",
    },
    "several_adapters": {
        "check": "each adapter's own keys are checked",
        "build_model": "a linear has several adapters",
        "load_model": "each adapter has its own start",
        "build_loader": "each adapter has its own rows",
        "train_step": "each adapter has its own loss, and its own update",
        "main": "optimizers, schedules and results are those of each adapter",
    },
    "distill_distributed": {
        "check": "the teacher is checked",
        "load_model": "the vocabulary is not split, as the teacher's logits are not",
        "build_loader": "tokens have a row in both models",
        "train_step": "the loss asks the teacher",
        "main": "the teacher is loaded",
    },
}


def functions(recipe: str) -> dict[str, str]:
    """Function name -> source, without comments and layout."""
    tree = ast.parse((ROOT / f"recipes/{recipe}.py").read_text())
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("recipe", DIFFERENT)
def test_functions_of_the_same_name_are_the_same(recipe: str) -> None:
    one, other = functions(FIRST), functions(recipe)
    assert {"train_step", "build_loader"} <= one.keys() & other.keys()
    different = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    assert different == DIFFERENT[recipe].keys()
