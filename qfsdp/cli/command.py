"""The `qfsdp` command: run, finetune, chat, serve, doctor, ls, cp, cat and validate.

`tune` runs the same functions for our files.

`ls`, `cp` and `cat` import neither torch nor torchtune; `run` and `validate` import what the recipe
imports.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from qfsdp import __version__
from qfsdp.common.devices import check_system
from qfsdp.common.errors import UserError, interrupts, user_errors
from qfsdp.common.files import why
from qfsdp.common.output import check_output, outlive_output_errors
from qfsdp.common.quiet import quiet_torchao
from qfsdp.config import recipe_files as recipes
from qfsdp.config import right_forms

RUN_USAGE = "[TORCHRUN-OPTIONS] RECIPE --config CONFIG [key=value ...]"
# Commands that run the recipe of their name, with the config of its name.
SHORT = ("chat", "serve", "doctor")
COMMANDS = ("run", "finetune", *SHORT, "ls", "cp", "cat", "validate")
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
    outlive_output_errors()
    with user_errors(), interrupts():
        check_system()
        check_current_folder()
        if words[:1] == ["--version"]:
            return print(f"qfsdp {__version__}")
        if words[:1] == ["run"]:
            return run(program, words[1:])
        if words[:1] and words[0] in SHORT:
            return run(program, _in_full(words))
        if words[:1] == ["finetune"]:
            from qfsdp.cli.finetune import finetune

            return finetune(program, words[1:], run)
        if not words:
            raise UserError(f"no command given; expected one of {', '.join(COMMANDS)}")
        if words[0] not in COMMANDS and not words[0].startswith("-"):
            raise UserError(right_forms.no_command(program, words[0], COMMANDS))
        args = _parser(program).parse_args(words)
        if args.subcommand == "ls":
            list_recipes()
        elif args.subcommand == "cp":
            copy(args.file, args.destination, args.no_clobber, args.make_parents)
        elif args.subcommand == "cat":
            print_file(args.file, args.sort)
        else:
            validate(args.config)
        check_output(unread=True)


def check_current_folder() -> None:
    """Raises UserError if the folder that the command was started in has been deleted since."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder was deleted; expected one that exists: cd") from None


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists what is expected")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(program, description="Recipes and configs of qfsdp.")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    commands.add_parser("run", help=f"run a recipe: {program} run {RUN_USAGE}")
    commands.add_parser("finetune", help=f"train a model on rows: {program} finetune MODEL ROWS")
    commands.add_parser("chat", help=f"talk to a model: {program} chat [key=value ...]")
    commands.add_parser("serve", help=f"OpenAI's API over a model: {program} serve [key=value ...]")
    commands.add_parser("doctor", help=f"what works here: {program} doctor [key=value ...]")
    commands.add_parser("ls", help="list recipes and their configs")
    cp = commands.add_parser("cp", help="copy a recipe or config, to edit it")
    cp.add_argument("file", help="a recipe or config, by its name or path")
    cp.add_argument("destination", type=Path, help="a file, or a folder that exists")
    cp.add_argument("-n", "--no-clobber", action="store_true", help="keep an existing file")
    cp.add_argument("--make-parents", action="store_true", help="create missing folders")
    cat = commands.add_parser("cat", help="print a recipe or config")
    cat.add_argument("file", help="a recipe or config, by its name or path")
    cat.add_argument("--sort", action="store_true", help="sort a config's keys; drops its comments")
    parser.add_argument("--version", action="store_true", help="print the version")
    validate = commands.add_parser("validate", help="check a config without running it")
    validate.add_argument("config", help="configs/NAME or a YAML file")
    return parser


def _in_full(words: Sequence[str]) -> list[str]:
    """`chat ...` as `recipes/chat --config configs/chat.yaml ...`, unless a config is given."""
    name, *rest = words
    given = any(word == "--config" or word.startswith("--config=") for word in rest)
    return [f"recipes/{name}", *([] if given else ["--config", f"configs/{name}.yaml"]), *rest]


# ---- run -----------------------------------------------------------------------------------


def run(program: str, words: Sequence[str]) -> None:
    """Runs a recipe in this process, or on torchrun's ranks if there are flags of torchrun.

    With flags the config is checked here, before any rank starts.
    """
    args = parse_run(program, words)
    recipe = recipes.find_recipe(args.training_script)
    if recipe is None:
        raise UserError(right_forms.no_recipe(program, args.training_script))
    if not recipes.runs_something(recipe):
        raise UserError(f"{args.training_script}: it starts nothing; {right_forms.LAST_LINE}")
    argv = _with_config_path(args.training_script_args)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # modules of the user
    from qfsdp.config import reference

    if reference.wants_help(argv):
        usage = RUN_USAGE.replace("RECIPE", args.training_script)
        return reference.print_help(f"{program} run {usage}", recipe, argv)
    if words[:1] == [args.training_script]:
        right_forms.check_flags(program, words)
        _check_config_file(recipe, argv)
        sys.argv = [recipe, *argv]
        runpy.run_path(recipe, run_name="__main__")
        return
    from qfsdp.launch import nodes, ranks
    from qfsdp.launch import start as launch

    if args.max_restarts < 0:
        raise UserError(f"--max-restarts: {args.max_restarts} is not valid; expected 0 or more")
    args.training_script, args.training_script_args = recipe, argv
    nodes.set_rendezvous(args, ranks.numbers_of_nodes(str(args.nnodes)))
    with ranks.torchrun_flags(str(args.nnodes), str(args.nproc_per_node)):
        launch.check_recipe(recipe, argv)
    nodes.wait_for_master(args)
    ranks.run_ranks(args)


def _check_config_file(recipe: str, argv: Sequence[str]) -> None:
    """Finds what is wrong with the config file before the recipe imports torch, which takes
    seconds. Raises UserError."""
    from qfsdp.config.load import read_yaml, required_config

    path = next((word.removeprefix("--config=") for word in argv if "--config=" in word[:9]), None)
    if "--config" in argv[:-1]:
        path = argv[argv.index("--config") + 1]
    if path is not None:
        read_yaml(path)
    elif not argv and "launch(__file__" in Path(recipe).read_text("utf-8"):  # none that takes words
        raise required_config()


def parse_run(program: str, words: Sequence[str]) -> argparse.Namespace:
    """Splits `[TORCHRUN-OPTIONS] RECIPE [RECIPE-OPTIONS]`; the names are torchrun's.

    Without options of torchrun, only `training_script` and `training_script_args` are set.
    """
    if not words:
        raise UserError(f"run: no recipe given; expected {program} run {RUN_USAGE}")
    if not words[0].startswith("-"):
        rest = list(words[1:])
        return argparse.Namespace(training_script=words[0], training_script_args=rest)
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.usage = f"{program} run", f"{program} run {RUN_USAGE}"
    parser.epilog = f"`{program} run RECIPE --help` lists the keys of a recipe."
    args, others = parser.parse_known_args(words)
    if others and others[0].startswith(("--config", "-c")):  # in the recipe's place
        config = others[0].partition("=")[2] or args.training_script
        raise UserError(right_forms.no_recipe(program, config))
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return args


def _with_config_path(argv: list[str]) -> list[str]:
    """Replaces the name of a config after --config by its path."""
    found = []
    for at, word in enumerate(argv):
        if word.startswith("--config="):
            name = word.removeprefix("--config=")
            word = f"--config={recipes.find_config(name) or name}"
        elif at and argv[at - 1] == "--config":
            word = recipes.find_config(word) or word
        found.append(word)
    return found


# ---- ls, cp, cat, validate -----------------------------------------------------------------


def list_recipes() -> None:
    """Prints every recipe with its configs, in two columns."""
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
    source = recipes.find_either(name)
    if source is None:
        raise UserError(f"{name}: no such recipe or config; expected one that `qfsdp ls` lists")
    if not destination.is_dir():
        destination = _with_suffix(destination, Path(source).suffix)
        if make_parents:
            destination.parent.mkdir(parents=True, exist_ok=True)
    if no_clobber and destination.is_file():
        return print(f"File already exists at {destination.absolute()}, not overwriting.")
    try:
        print(f"Copied file to {shutil.copy(source, destination)}")
    except OSError as error:
        hint = "" if destination.parent.is_dir() else "; --make-parents creates its folder"
        raise UserError(f"{destination}: cannot be written: {why(error)}{hint}") from None


def _with_suffix(path: Path, suffix: str) -> Path:
    """`my` and `my.txt` as `my.yaml`, `my.yml` as it is. The end of `llama3.1` is no suffix."""
    if {path.suffix, suffix} == {".yml", ".yaml"}:
        return path
    is_suffix = re.fullmatch(r"\.[A-Za-z]+", path.suffix)
    return path.with_suffix(suffix) if is_suffix else Path(f"{path}{suffix}")


def print_file(name: str, sort: bool) -> None:
    """Prints a recipe or a config as it is; with `sort`, a config's keys sorted, without comments.
    Raises UserError."""
    path = recipes.find_either(name) or name
    try:
        text = Path(path).read_text(encoding="utf-8")
        if sort and not path.endswith(".py"):
            import yaml

            tree = yaml.safe_load(text)
            text = yaml.dump(tree, sort_keys=True, indent=4, width=80, allow_unicode=True)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: {why(error)}; expected a recipe or a config") from None
    except Exception as error:  # yaml.YAMLError, which is not imported without --sort
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise UserError(f"{name}: {why(error)}; expected a YAML file") from None
    print(text, end="" if text.endswith("\n") else "\n")


def validate(name: str) -> None:
    """Checks a config against its recipe's schema and its components against their signatures.
    Raises UserError."""
    from qfsdp.launch.start import validate_config

    path = recipes.find_config(name) or name
    validate_config(path, recipes.recipe_file_of(path))
    print("Config is well-formed!")


if __name__ == "__main__":
    main()
