"""Makes torchtune's `tune` command know qfsdp's recipes, without touching torchtune.

`tune run recipes/NAME` cannot work by itself: `tune` puts the working directory last on
`sys.path`, and torchtune installs a top-level `recipes` package whose import raises. So a `.pth`
file imports this module at every start of the interpreter; it installs a finder that waits for
three of torchtune's modules and then adds to them:

  torchtune._recipe_registry  entries for our recipes and configs, and for those in the working
                              directory, which win: it is where a user edits copies of ours
  torchtune._cli.run          recipes anywhere on disk; the preflight before torchrun starts ranks
  torchtune._cli.validate     our configs, against the schema of the recipe they belong to

Every interpreter pays for this import: nothing but `os` and `sys` (both loaded already) before
torchtune is there. A failure in here is told in one line and leaves torchtune as it is.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

DEFAULT_RECIPE = "recipes/qdora_distributed"


class Name(str):
    """A registry name that also equals itself with the file's suffix, and as `./name`."""

    suffix: str

    def __new__(cls, text: str, suffix: str) -> Name:
        name = super().__new__(cls, text)
        name.suffix = suffix
        return name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._bare(self) == self._bare(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._bare(self))

    def _bare(self, text: str) -> str:
        return os.path.normpath(str(text)).removesuffix(self.suffix)


# ---- what there is -------------------------------------------------------------------------


def _roots() -> list[str]:
    """Where `recipes/` and `configs/` lie: in the package (wheel) or beside it (checkout), and
    in the working directory; later ones win."""
    package = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.isdir(os.path.join(package, "recipes"))
    return [package if installed else os.path.dirname(package), os.getcwd()]


def _files(folder: str, suffix: str) -> dict[str, str]:
    """`folder/name` without suffix -> absolute path, over all roots."""
    found = {}
    for root in _roots():
        path = os.path.join(root, folder)
        for file in os.listdir(path) if os.path.isdir(path) else []:
            if file.endswith(suffix) and not file.startswith(("_", ".")):
                found[f"{folder}/{file.removesuffix(suffix)}"] = os.path.join(path, file)
    return dict(sorted(found.items(), key=lambda item: (item[0] != DEFAULT_RECIPE, item[0])))


def find_file(name: str, suffix: str) -> str:
    """The file that `tune` takes for `recipes/NAME` (".py") or `configs/NAME` (".yaml").

    Raises KeyError where there is none.
    """
    return _files(name.partition("/")[0], suffix)[name.removesuffix(suffix)]


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


def _add_recipes(registry: ModuleType) -> None:
    entries = {
        name: registry.Recipe(Name(name, ".py"), path, [], supports_distributed=True)
        for name, path in _files("recipes", ".py").items()
    }
    for name, path in _files("configs", ".yaml").items() if entries else ():
        owner = entries.get(recipe_named_by(path) or "") or next(iter(entries.values()))
        owner.configs.append(registry.Config(Name(f"{name}.yaml", ".yaml"), path))
    registry.get_all_recipes().extend(entries.values())


# ---- tune run, tune validate ---------------------------------------------------------------


def _extend_run(cli: ModuleType) -> None:
    known_recipe = cli.Run._get_recipe
    run_distributed = cli.Run._run_distributed

    def get_recipe(self: Any, recipe_str: str) -> Any:
        # torchtune imports any other recipe as a module from the working directory, which does
        # not reach other places. Ours run as files; foreign ones are left to torchtune.
        from qfsdp.launch import is_recipe

        path = os.path.abspath(recipe_str.removesuffix(".py") + ".py")
        recipe = known_recipe(self, recipe_str)
        if recipe is None and is_recipe(path):
            recipe = cli.Recipe(recipe_str, path, [], supports_distributed=True)
        elif recipe is None and os.path.normpath(recipe_str).startswith("recipes/"):
            self._parser.error(f"no recipe '{recipe_str}'; `tune ls` lists those that exist")
        return recipe

    def run_checked(self: Any, args: Any, is_builtin: bool) -> None:
        from qfsdp import launch

        if not launch.is_recipe(args.recipe):
            return run_distributed(self, args, is_builtin)
        ranks = launch.torchrun_flags(str(args.nnodes), str(args.nproc_per_node))
        with launch.user_errors(), ranks:
            launch.check_recipe(args.recipe, args.recipe_args)
        if str(args.nproc_per_node).isdecimal():
            launch.share_cores(int(args.nproc_per_node))
        with launch.rank_failures(args.max_restarts):
            run_distributed(self, args, is_builtin)

    cli.Run._get_recipe = get_recipe
    cli.Run._run_distributed = run_checked


def _extend_validate(cli: ModuleType) -> None:
    theirs = cli.Validate._validate_cmd

    def validate(self: Any, args: Any) -> None:
        from torchtune._recipe_registry import get_all_recipes

        from qfsdp import launch

        recipes = {str(r.name): r for r in get_all_recipes() if isinstance(r.name, Name)}
        configs = [config for recipe in recipes.values() for config in recipe.configs]
        path = next((c.file_path for c in configs if c.name == str(args.config)), str(args.config))
        if not recipes or not _is_our_config(path):
            return theirs(self, args)
        recipe = recipes.get(recipe_named_by(path) or DEFAULT_RECIPE)
        with launch.user_errors():
            launch.validate_config(path, (recipe or next(iter(recipes.values()))).file_path)
        print("Config is well-formed!")

    cli.Validate._validate_cmd = validate


def _is_our_config(path: str) -> bool:
    """torchtune's configs build their model from a `_component_`; ours load it from a path."""
    from omegaconf import OmegaConf

    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        model = tree.get("model")
    except Exception:
        return True  # missing or broken: our reader tells it in one line
    return isinstance(model, dict) and "_component_" not in model


def quiet_torchao() -> None:
    """Silences torchao's warning about C++ extensions, which qfsdp does not use: it would stand
    above every one-line error of ours, whatever is imported of torchao."""
    import logging

    logging.getLogger("torchao").setLevel(logging.ERROR)


# ---- the finder ----------------------------------------------------------------------------

_CALLBACKS = {
    "torchtune._recipe_registry": _add_recipes,
    "torchtune._cli.run": _extend_run,
    "torchtune._cli.validate": _extend_validate,
}


class _Finder:
    """Lets the other finders find a module and calls back once it has been executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name == "torchao" and os.path.basename(sys.argv[0]) in ("tune", "tune.py"):
            quiet_torchao()
        callback = _CALLBACKS.get(name)
        if callback is None:
            return None
        for finder in sys.meta_path:
            if finder is not _Finder and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    return _then(spec, callback)
        return None


def _then(spec: ModuleSpec, callback: Callable[[ModuleType], None]) -> ModuleSpec:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            callback(module)
        except Exception as error:  # torchtune must work even where we do not
            print(f"qfsdp: cannot extend {spec.name}: {error!r}", file=sys.stderr)

    loader.exec_module = exec_module
    return spec


def install() -> None:
    """Puts the finder first on `sys.meta_path`, once."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


install()
