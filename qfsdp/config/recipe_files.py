"""Where recipes and configs are, and which recipe a config belongs to.

A recipe is a Python file that defines `Config` and `main`. It is found by its path, or by its name:
`recipes/NAME` or NAME. A config is found by its path, `configs/NAME` or NAME. Suffixes are
optional. The names come from two places, and the second wins: what comes with qfsdp (inside the
package in a wheel, next to it in a checkout), and the working directory.

A config belongs to the recipe of the first comment line that runs it:

    # tune run recipes/NAME --config configs/CONFIG.yaml

That line stands above all keys. A config without one belongs to the recipe beside it, `recipe.py`,
as in the directory of a run, or else to `DEFAULT_RECIPE`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from qfsdp.common.errors import UserError
from qfsdp.common.messages import nearest

DEFAULT_RECIPE = "recipes/qdora_distributed"
_SUFFIXES = {"recipes": ".py", "configs": ".yaml"}


def list_files(kind: str) -> dict[str, str]:
    """Names without suffix -> absolute paths of all "recipes" or "configs", the default first."""
    found = {}
    for root in _roots():
        folder = os.path.join(root, kind)
        for file in os.listdir(folder) if os.path.isdir(folder) else []:
            name, suffix = os.path.splitext(file)
            if suffix == _SUFFIXES[kind] and not name.startswith(("_", ".")):
                found[f"{kind}/{name}"] = os.path.join(folder, file)
    return dict(sorted(found.items(), key=lambda item: (item[0] != DEFAULT_RECIPE, item[0])))


def find_file(name: str) -> str | None:
    """The file of `recipes/NAME`, `configs/NAME` or an example (`examples/grpo/train`), with or
    without suffix; None without one."""
    name = os.path.normpath(name)
    kind = name.partition(os.sep)[0]
    if kind == "examples":
        suffixes = ("", *_SUFFIXES.values())
        files = (os.path.join(root, name + suffix) for root in _roots() for suffix in suffixes)
        return next((file for file in files if os.path.isfile(file)), None)
    if kind not in _SUFFIXES:
        return None
    return list_files(kind).get(name.removesuffix(_SUFFIXES[kind]))


def find_recipe(name: str) -> str | None:
    """The file of a recipe by its name or its path, the suffix optional; None if it is not one.

    A file of the working directory wins.
    """
    path = os.path.abspath(name.removesuffix(".py") + ".py")
    for file in (find_file(name), path, find_file(f"recipes/{name}")):
        if file is not None and is_recipe(file):
            return file
    return None


def find_config(name: str) -> str | None:
    """The file of a config by its name or its path, the suffix optional; None if there is none.

    A file of the working directory wins.
    """
    for path in (name, f"{name}.yaml"):
        if os.path.isfile(path):
            return path
    return find_file(name) or find_file(f"configs/{name}")


def similar_name(kind: str, name: str) -> str | None:
    """The most similar name of the "recipes" or "configs", or the first that contains `name`."""
    stem = os.path.basename(name).removesuffix(_SUFFIXES[kind])
    known = {os.path.basename(full): full for full in list_files(kind)}
    inside = next((other for other in known if stem and stem in other), None)
    return known.get(nearest(stem, known) or inside or "")


def find_either(name: str) -> str | None:
    """The file of a recipe or a config, as `find_recipe` and `find_config` know them. Raises
    UserError: both have the name, such as `merge`."""
    recipe, config = find_file(f"recipes/{name}"), find_file(f"configs/{name}")
    if recipe and config and not os.path.isfile(name):
        both = f"recipes/{name} or configs/{name}"
        raise UserError(f"{name}: a recipe and a config have this name; expected {both}")
    return find_file(name) or find_config(name) or find_recipe(name)


def is_recipe(path: str | Path) -> bool:
    """Whether a Python file defines `Config` and `main` at its top level."""
    try:
        return {"Config", "main"} <= defined_names(path)
    except (OSError, SyntaxError, ValueError):
        return False


def defined_names(path: str | Path) -> set[str]:
    """Classes and functions at the top level of a Python file; raises OSError, SyntaxError and
    ValueError."""
    tree = ast.parse(Path(path).read_bytes())
    return {name for statement in tree.body if (name := getattr(statement, "name", None))}


def runs_something(path: str | Path) -> bool:
    """Whether a Python file does more at its top level than import and define."""
    tree = ast.parse(Path(path).read_bytes())
    defines = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)
    rest = [statement for statement in tree.body if not isinstance(statement, defines)]
    return any(not isinstance(getattr(one, "value", None), ast.Constant) for one in rest)


def load_recipe(recipe_file: str | Path) -> ModuleType:
    """Imports a recipe file without running it."""
    name = f"qfsdp_recipe_{Path(recipe_file).stem}"
    spec = importlib.util.spec_from_file_location(name, recipe_file)
    assert spec is not None and spec.loader is not None, recipe_file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


def recipe_of_config(config_file: str | Path) -> str | None:
    """The `recipes/NAME` in the comments above a config's keys; None without one."""
    if not os.path.isfile(config_file):
        return None
    with open(config_file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                return None
            words = line.lstrip("# ").split()
            if words[:2] in (["tune", "run"], ["qfsdp", "run"]):
                names = [word for word in words if word.startswith("recipes/")]
                return names[0].removesuffix(".py") if names else None
    return None


def recipe_file_of(config_file: str | Path) -> str:
    """The file of the recipe that a config belongs to; raises UserError without one."""
    name = recipe_of_config(config_file)
    beside = os.path.join(os.path.dirname(config_file), "recipe.py")
    if name is None and is_recipe(beside):
        return beside
    name = name or DEFAULT_RECIPE
    found = find_recipe(name)
    if found is None:
        raise UserError(f"{config_file}: its first line names {name}, which does not exist")
    return found


def _roots() -> list[str]:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = os.path.isdir(os.path.join(package, "recipes"))
    return [package if installed else os.path.dirname(package), os.getcwd()]
