"""Everything that depends on torchtune's internals: `tune` runs our files, torchtune imports.

`tune` cannot find recipes outside torchtune, and torchtune 0.6.1 imports names that torchao 0.16
and later no longer have. So a `.pth` file imports this module at every start of the interpreter.
It installs a finder that acts on five imports:

  torchtune                        is a stand-in where the `tune` script runs recipes/NAME
  torchtune._cli.tune              `main` passes commands on our files to `qfsdp.cli.command`
  torchtune.training.quantization  needs three names of torchao; stand-ins are added first
  torchao.dtypes.nf4tensor         is loaded from its place in newer versions of torchao
  torchao                          prints warnings; they are silenced where the program is `tune`

Every interpreter pays for this import, so it needs only `os` and `sys`, which are loaded already.
A failure in here prints one line and leaves torchtune as it is.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


# ---- the `tune` command --------------------------------------------------------------------


def _extend_tune(cli: Any) -> None:
    """Replaces `main`, which the `tune` script imports."""
    theirs = cli.main

    def main() -> None:
        from qfsdp.cli import command
        from qfsdp.common.output import outlive_output_errors

        words = sys.argv[1:]
        asked = {"-h", "--help"} & set(words)
        if not words or words[0] in asked or (words[0] == "run" and words[1:2] in _HELP):
            outlive_output_errors()
            try:
                theirs()  # ends the process
            finally:
                print(_ALSO)
        elif words == ["ls"]:
            outlive_output_errors()
            command.list_recipes()
            print()
            theirs()
        elif (not asked or words[0] == "run") and _is_ours(words):
            command.run_command("tune", words)
        else:
            theirs()

    cli.main = main


_HELP = (["-h"], ["--help"])
_ALSO = """
recipes of qfsdp:
  tune ls                                  lists them first
  tune run NAME --config NAME [key=value]  runs one, on every accelerator or torchrun's ranks
  tune run NAME --help                     prints its keys"""


def _runs_ours(words: list[str]) -> bool:
    """Whether a command line is `run`, flags of torchrun and recipes/NAME, which is always ours.

    Says so without an import: torchtune takes 2.4 s, in which no mistake can be told.
    """
    before = ""
    for word in words[1:] if words[:1] == ["run"] else []:
        if os.path.normpath(word).startswith("recipes" + os.sep):
            return True
        is_flag = word.startswith("-") and not word.startswith("--config")
        if not is_flag and not before.startswith("-"):
            return False  # neither a flag nor its value: another recipe
        before = word
    return False


def _is_ours(words: list[str]) -> bool:
    """Whether a command line names a recipe or config of qfsdp, or one that a user copied.

    A name that torchtune has too is torchtune's, unless `recipes/` or `configs/` stands before it,
    a file of the user has it, or the config of a run is none of torchtune's.
    """
    if _runs_ours(words):
        return True
    from torchtune._recipe_registry import get_all_recipes

    from qfsdp.cli import command
    from qfsdp.common.errors import UserError
    from qfsdp.config import recipe_files as recipes

    known = get_all_recipes()
    theirs = {recipe.name for recipe in known}
    configs = {config.name for recipe in known for config in recipe.configs}
    if words[:1] == ["run"] and len(words) > 1:
        args = command.parse_run("tune", words[1:])
        name, file = args.training_script, recipes.find_recipe(args.training_script)
        if file is None or name not in theirs or os.path.dirname(file) == os.getcwd():
            return file is not None
        return _takes_our_config(name, args.training_script_args, configs)
    files = [word for word in words[1:] if not word.startswith("-")]
    if not files or words[0] not in ("cp", "cat", "validate"):
        return False
    theirs |= configs
    try:
        found = recipes.find_either(files[0])
    except UserError:  # two of ours have the name
        return files[0] not in theirs
    if found is not None and files[0] in theirs and not os.path.isfile(files[0]):
        _say(f"{files[0]}: torchtune's; qfsdp's is recipes/{files[0]}")
        return False
    if words[0] == "validate":
        return not _builds_a_model(found or files[0])
    return found is not None


def _takes_our_config(name: str, argv: list[str], theirs: set[str]) -> bool:
    """Whether a recipe's name that torchtune has too means ours: its config decides."""
    from qfsdp.config import recipe_files as recipes

    config = ""
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        if word == "--config" or word.startswith("--config="):
            config = after if word == "--config" else word.removeprefix("--config=")
    file = recipes.find_config(config) if config and config not in theirs else None
    ours = file is not None and not _builds_a_model(file)
    if ours:
        _say(f"{name}: qfsdp's recipe, as {config} is no config of torchtune")
    elif config not in theirs:
        _say(f"{name}: torchtune's recipe; qfsdp's is recipes/{name}")
    return ours


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _builds_a_model(config: str) -> bool:
    """Whether a config is torchtune's: it builds its model from a `_component_`."""
    import yaml

    try:
        with open(config, encoding="utf-8") as file:
            return "_component_" in yaml.safe_load(file)["model"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
        return False  # our reader reports a missing or broken file in one line


# ---- names that torchtune 0.6.1 imports and torchao 0.16 and later no longer have ----------

_NF4 = "torchao.dtypes.nf4tensor"
_NF4_NOW = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
_REMOVED = {
    "torchao.dtypes": ["TensorCoreTiledLayout"],
    "torchao.quantization": ["int4_weight_only", "int8_dynamic_activation_int4_weight"],
}


class _NF4Loader:
    """Fills `torchao.dtypes.nf4tensor` with what the module at its new place defines."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        from importlib import import_module

        names = vars(import_module(_NF4_NOW))
        vars(module).update({k: v for k, v in names.items() if not k.startswith("__")})


def _add_removed_names() -> None:
    """Adds stand-ins, which only torchtune's own quantization recipes would call."""
    from importlib import import_module

    for name, removed in _REMOVED.items():
        module = import_module(name)
        for attribute in removed:
            if not hasattr(module, attribute):
                setattr(module, attribute, _stand_in(f"{name}.{attribute}"))


def _stand_in(path: str) -> Any:
    def removed(*args: Any, **kwargs: Any) -> None:
        raise ImportError(f"{path}: this torchao does not have it; torchtune 0.6.1 needs 0.15")

    return removed


# ---- the finder ----------------------------------------------------------------------------


class _StandIn:
    """Fills `torchtune` with the one function that the `tune` script imports. The function takes
    the stand-in away before anything else may import torchtune."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        names = ("torchtune", "torchtune._cli", "torchtune._cli.tune")

        def main() -> None:
            for name in names:
                del sys.modules[name]
            from qfsdp.cli.command import run_command

            run_command("tune", sys.argv[1:])

        for name in names[1:]:
            sys.modules[name] = type(module)(name)
        sys.modules[names[-1]].main = main  # type: ignore[attr-defined]


class _Finder:
    """Acts on the imports above; all other modules are left to the other finders."""

    may_stand_in = True  # once: what a recipe imports is torchtune itself

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name == "torchtune" and _Finder.may_stand_in:
            if _is_tune() and _runs_ours(sys.argv[1:]):
                _Finder.may_stand_in = False
                return _new_spec(name, _StandIn, is_package=True)
        elif name == "torchao" and _is_tune():
            from qfsdp.common.quiet import quiet_torchao

            quiet_torchao()
        elif name == "torchtune.training.quantization":
            _add_removed_names()
        elif name == _NF4:
            return _spec_of(name, path, target) or _new_spec(name, _NF4Loader)
        elif name == "torchtune._cli.tune" and (spec := _spec_of(name, path, target)):
            from qfsdp.common.devices import need_home

            need_home()  # what torchtune imports ends with a traceback without one
            return _then_extend(spec)
        return None


def _is_tune() -> bool:
    return os.path.basename(sys.argv[0]) == "tune"


def _spec_of(name: str, path: Sequence[str] | None, target: Any) -> Any:
    """What the other finders find; None without a loader."""
    for finder in sys.meta_path:
        if finder is not _Finder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                return spec
    return None


def _new_spec(name: str, loader: Any, is_package: bool = False) -> ModuleSpec:
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, loader, is_package=is_package)


def _then_extend(spec: Any) -> Any:
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _extend_tune(module)
        except Exception as error:  # torchtune must work even if this fails
            print(f"qfsdp: cannot extend {spec.name}: {error!r}", file=sys.stderr)

    spec.loader.exec_module = exec_module
    return spec


def install() -> None:
    """Puts the finder first on `sys.meta_path`, once."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


install()
