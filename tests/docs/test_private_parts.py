"""docs/internals/private-parts.md lists what qfsdp uses of other packages that they may change."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import ROOT

PAGE = ROOT / "docs/internals/private-parts.md"
ROW = re.compile(r"^\| (`.+?) \|", re.MULTILINE)  # the first cell
LISTED = [
    name
    for row in ROW.findall(PAGE.read_text().partition("## What is replaced")[0])
    for name in re.findall(r"`([\w.]+)`", row)
]
PUBLIC = ("os", "sys")  # `os._exit` and `sys._getframe` are documented
OF_PYTHON = {"_asdict", "_replace"}  # of named tuples, documented
OF_PYTORCH = ("torch.", "torchtune.", "torchao.")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of other packages, "torch....", or ".attribute" of an object of theirs."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith(OF_PYTORCH):
                if id(node) not in inner and "(" not in name:  # the longest chain only
                    yield name
            elif name.partition(".")[0] not in PUBLIC and node.attr not in own | OF_PYTHON:
                yield node.attr


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """The private names that qfsdp defines itself."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def used() -> set[str]:
    files = [*ROOT.glob("qfsdp/**/*.py"), *ROOT.glob("recipes/*.py")]
    trees = {file: ast.parse(file.read_text()) for file in files}
    own = own_names(trees)
    names = {name for tree in trees.values() for name in private_names(tree, own)}
    return {name for name in names if is_private(name)}


def test_page_lists_every_private_part() -> None:
    assert sorted(LISTED) == sorted(used())


@pytest.mark.parametrize("name", [n for n in LISTED if "." in n])
def test_the_installed_version_has_it(name: str) -> None:
    """A new PyTorch that lacks one is named here, before anything that uses it fails."""
    if name.startswith("torchtune."):
        pytest.importorskip("torchtune")
    words = name.split(".")
    found = importlib.import_module(words[0])
    for at, word in enumerate(words[1:], 2):
        if not hasattr(found, word):
            importlib.import_module(".".join(words[:at]))
        found = getattr(found, word)
