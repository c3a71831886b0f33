"""TODO cli.recipes."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType


def is_recipe(path: str | Path) -> bool:
    """Whether a file is a qfsdp recipe: whether it ends in a call that all of them end in, this
    module's or that of tools (`qfsdp.cli.tool_config`)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return re.search(r"\b(launch\(\s*__file__|run_tool\(\s*Config)", text) is not None


def load_recipe(recipe_file: str | Path) -> ModuleType:
    """Imports a recipe file without running it."""
    name = f"qfsdp_recipe_{Path(recipe_file).stem}"
    spec = importlib.util.spec_from_file_location(name, recipe_file)
    assert spec is not None and spec.loader is not None, recipe_file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


DEFAULT_RECIPE = "recipes/qdora_distributed"


# ---- what there is -------------------------------------------------------------------------


def roots() -> list[str]:
    """Where `recipes/` and `configs/` lie: in the package (wheel) or beside it (checkout), and
    in the working directory; later ones win."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = os.path.isdir(os.path.join(package, "recipes"))
    return [package if installed else os.path.dirname(package), os.getcwd()]


def files_in(folder: str, suffix: str) -> dict[str, str]:
    """`folder/name` without suffix -> absolute path, over all roots."""
    found = {}
    for root in roots():
        path = os.path.join(root, folder)
        for file in os.listdir(path) if os.path.isdir(path) else []:
            if file.endswith(suffix) and not file.startswith(("_", ".")):
                found[f"{folder}/{file.removesuffix(suffix)}"] = os.path.join(path, file)
    return dict(sorted(found.items(), key=lambda item: (item[0] != DEFAULT_RECIPE, item[0])))


def find_file(name: str, suffix: str) -> str:
    """The file that `tune` takes for `recipes/NAME` (".py") or `configs/NAME` (".yaml").

    Raises KeyError where there is none.
    """
    return files_in(name.partition("/")[0], suffix)[name.removesuffix(suffix)]


def recipe_named_by(config: str) -> str | None:
    """The `recipes/NAME` in a YAML file's leading comment, as in `# tune run recipes/NAME`."""
    import re

    if not os.path.isfile(config):
        return None
    with open(config, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                return None
            if match := re.search(r"tune run .*?(recipes/[\w-]+)", line):
                return match[1]
    return None
