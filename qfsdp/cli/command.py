"""The `qfsdp` command: run, ls, cp, cat and validate. `tune` runs the same functions for our files.

`ls`, `cp` and `cat` import neither torch nor torchtune; `run` and `validate` import what the recipe
imports.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from qfsdp.cli import recipes
from qfsdp.cli.errors import UserError, user_errors
from qfsdp.cli.quiet import quiet_torchao

RUN_USAGE = "[TORCHRUN-OPTIONS] RECIPE --config CONFIG [key=value ...]"
_ROW = "{:<40} {:<40}"


def main() -> None:
    """The entry point of the `qfsdp` script."""
    run_command("qfsdp", sys.argv[1:])


def run_command(program: str, words: Sequence[str]) -> None:
    """Runs one subcommand.

    Args:
        program: "qfsdp" or "tune", for usage messages.
        words: the command line after the program's name.

    Ends the process with status 2 and one line on stderr after a UserError.
    """
    quiet_torchao()
    with user_errors():
        if words[:1] == ["run"]:
            return run(program, words[1:])
        args = _parser(program).parse_args(words)
        if args.subcommand == "ls":
            list_recipes()
        elif args.subcommand == "cp":
            copy(args.file, args.destination, args.no_clobber, args.make_parents)
        elif args.subcommand == "cat":
            print_config(args.config, args.sort)
        else:
            validate(args.config)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(program, description="Recipes and configs of qfsdp.")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    commands.add_parser("run", help=f"run a recipe: {program} run {RUN_USAGE}")
    commands.add_parser("ls", help="list recipes and their configs")
    cp = commands.add_parser("cp", help="copy a recipe or config, to edit it")
    cp.add_argument("file", help="recipes/NAME or configs/NAME")
    cp.add_argument("destination", type=Path, help="a file, or a folder that exists")
    cp.add_argument("-n", "--no-clobber", action="store_true", help="keep an existing file")
    cp.add_argument("--make-parents", action="store_true", help="create missing folders")
    cat = commands.add_parser("cat", help="print the keys of a config")
    cat.add_argument("config", help="configs/NAME or a YAML file")
    cat.add_argument("--sort", action="store_true", help="sort the keys")
    validate = commands.add_parser("validate", help="check a config without running it")
    validate.add_argument("config", help="configs/NAME or a YAML file")
    return parser


# ---- run -----------------------------------------------------------------------------------


def run(program: str, words: Sequence[str]) -> None:
    """Runs a recipe in this process, or on torchrun's ranks if there are flags of torchrun.

    With flags the config is checked here, before any rank starts.
    """
    args = parse_run(program, words)
    recipe = recipes.find_recipe(args.training_script)
    if recipe is None:
        raise UserError(
            f"{args.training_script}: no such recipe; expected one that `{program} ls` lists, "
            "or a Python file that defines Config and main"
        )
    argv = _with_config_path(args.training_script_args)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # modules of the user
    if words[:1] == [args.training_script]:
        sys.argv = [recipe, *argv]
        runpy.run_path(recipe, run_name="__main__")
        return
    from qfsdp.cli import launch, ranks

    args.training_script, args.training_script_args = recipe, argv
    if not args.rdzv_endpoint and args.nnodes in ("1", "1:1"):
        args.standalone = True  # a free port, so that several runs can share a machine
    with ranks.torchrun_flags(str(args.nnodes), str(args.nproc_per_node)):
        launch.check_recipe(recipe, argv)
    ranks.run_ranks(args)


def parse_run(program: str, words: Sequence[str]) -> argparse.Namespace:
    """Splits `[TORCHRUN-OPTIONS] RECIPE [RECIPE-OPTIONS]`; the names are torchrun's.

    Without options of torchrun, only `training_script` and `training_script_args` are set.
    """
    if words and not words[0].startswith("-"):
        rest = list(words[1:])
        return argparse.Namespace(training_script=words[0], training_script_args=rest)
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.usage = f"{program} run", f"{program} run {RUN_USAGE}"
    return parser.parse_args(words)


def _with_config_path(argv: list[str]) -> list[str]:
    """Replaces `configs/NAME` after --config by the path of that config."""
    found = []
    for at, word in enumerate(argv):
        if word.startswith("--config="):
            name = word.removeprefix("--config=")
            word = f"--config={recipes.find_file(name) or name}"
        elif at and argv[at - 1] == "--config":
            word = recipes.find_file(word) or word
        found.append(word)
    return found


# ---- ls, cp, cat, validate -----------------------------------------------------------------


def list_recipes(header: bool = True) -> None:
    """Prints every recipe with its configs, in two columns."""
    if header:
        print(_ROW.format("RECIPE", "CONFIG"))
    files = recipes.list_files("recipes")
    configs: dict[str, list[str]] = {n: [] for n, file in files.items() if recipes.is_recipe(file)}
    for name, file in recipes.list_files("configs").items():
        owner = recipes.recipe_of_config(file)
        configs.setdefault(owner or recipes.DEFAULT_RECIPE, []).append(f"{name}.yaml")
    for recipe, names in configs.items():
        for at, name in enumerate(names or ["<>"]):
            print(_ROW.format("" if at else recipe, name))


def copy(name: str, destination: Path, no_clobber: bool, make_parents: bool) -> None:
    """Copies a recipe or config; a destination that is a file gets the right suffix."""
    source = recipes.find_file(name)
    if source is None:
        raise UserError(f"{name}: no such recipe or config; expected one that `qfsdp ls` lists")
    if not destination.is_dir():
        destination = destination.with_suffix(Path(source).suffix)
        if make_parents:
            destination.parent.mkdir(parents=True, exist_ok=True)
    if no_clobber and destination.is_file():
        return print(f"File already exists at {destination.absolute()}, not overwriting.")
    try:
        print(f"Copied file to {shutil.copy(source, destination)}")
    except OSError as error:
        hint = "" if destination.parent.is_dir() else "; --make-parents creates its folder"
        raise UserError(f"{destination}: cannot be written: {error.strerror}{hint}") from None


def print_config(name: str, sort: bool) -> None:
    """Prints a config's keys and values without its comments."""
    import yaml

    path = recipes.find_file(name) or name
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{name}: {reason}; expected a YAML file, or configs/NAME") from None
    print(yaml.dump(tree, sort_keys=sort, indent=4, width=80, allow_unicode=True), end="")


def validate(name: str) -> None:
    """Checks a config against its recipe's schema and its components against their signatures.

    Raises UserError.
    """
    from qfsdp.cli.launch import validate_config

    path = recipes.find_file(name) or name
    validate_config(path, recipes.recipe_file_of(path))
    print("Config is well-formed!")


if __name__ == "__main__":
    main()
