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

from qfsdp.cli.recipes import DEFAULT_RECIPE, files_in, recipe_named_by

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


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


def _add_recipes(registry: ModuleType) -> None:
    entries = {
        name: registry.Recipe(Name(name, ".py"), path, [], supports_distributed=True)
        for name, path in files_in("recipes", ".py").items()
    }
    for name, path in files_in("configs", ".yaml").items() if entries else ():
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
        from qfsdp.cli.recipes import is_recipe

        path = os.path.abspath(recipe_str.removesuffix(".py") + ".py")
        recipe = known_recipe(self, recipe_str)
        if recipe is None and is_recipe(path):
            recipe = cli.Recipe(recipe_str, path, [], supports_distributed=True)
        elif recipe is None and os.path.normpath(recipe_str).startswith("recipes/"):
            self._parser.error(f"no recipe '{recipe_str}'; `tune ls` lists those that exist")
        return recipe

    def run_checked(self: Any, args: Any, is_builtin: bool) -> None:
        from qfsdp.cli import launch, ranks, recipes

        if not recipes.is_recipe(args.recipe):
            return run_distributed(self, args, is_builtin)
        with launch.user_errors(), ranks.torchrun_flags(str(args.nnodes), str(args.nproc_per_node)):
            launch.check_recipe(args.recipe, args.recipe_args)
        if str(args.nproc_per_node).isdecimal():
            ranks.share_cores(int(args.nproc_per_node))
        with ranks.rank_failures(args.max_restarts):
            run_distributed(self, args, is_builtin)

    cli.Run._get_recipe = get_recipe
    cli.Run._run_distributed = run_checked


def _extend_validate(cli: ModuleType) -> None:
    theirs = cli.Validate._validate_cmd

    def validate(self: Any, args: Any) -> None:
        from torchtune._recipe_registry import get_all_recipes

        from qfsdp.cli import launch

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


# ---- names of torchao that torchtune 0.6.1 imports and torchao 0.16 and later no longer have ----

_NF4 = "torchao.dtypes.nf4tensor"
_NF4_NOW = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"


def _moved_nf4() -> ModuleSpec:
    """`torchao.dtypes.nf4tensor`, with everything that the module at its new place defines."""
    from importlib import import_module
    from importlib.machinery import ModuleSpec

    class Loader:
        @staticmethod
        def create_module(spec: ModuleSpec) -> None:
            return None

        @staticmethod
        def exec_module(module: ModuleType) -> None:
            vars(module).update(vars(import_module(_NF4_NOW)) | {"__name__": _NF4})

    return ModuleSpec(_NF4, Loader)  # type: ignore[arg-type]


def _add_removed_names() -> None:
    """What `torchtune.training.quantization` imports and only its quantization recipes use."""
    import torchao.dtypes
    import torchao.quantization

    for module, name in (
        (torchao.dtypes, "TensorCoreTiledLayout"),
        (torchao.quantization, "int4_weight_only"),
        (torchao.quantization, "int8_dynamic_activation_int4_weight"),
    ):
        if not hasattr(module, name):
            setattr(module, name, type(name, (), {"__module__": module.__name__}))


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
        if name == "torchtune.training.quantization":
            _add_removed_names()
        callback = _CALLBACKS.get(name)
        if callback is None and name != _NF4:
            return None
        for finder in sys.meta_path:
            if finder is not _Finder and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    return spec if callback is None else _then(spec, callback)
        return _moved_nf4() if name == _NF4 else None


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
