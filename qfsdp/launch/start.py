"""Starts a recipe: checks its config, starts its ranks, and ends with an exit status.

Every recipe ends with `launch(__file__, Config, check, main)`. A plain start checks the config
once, then starts the recipe on every accelerator of the machine. A process of torchrun (or of
`tune run --nproc_per_node N`) is one of the ranks and runs `main`. `check_recipe` and
`validate_config` check a config for the command, before any rank exists.

Exit statuses: 0; 2 after a UserError; 75 of a run that hangs (`qfsdp.launch.watchdog`); 76 of a
rank that has lost another one (`qfsdp.launch.lost_peers`); that of SIGINT after Ctrl-C; else that
of the first failed rank. A run that has saved after SIGTERM or SIGINT ends with 0
(`qfsdp.launch.signals`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from qfsdp.common import progress
from qfsdp.common.devices import unused_driver
from qfsdp.common.errors import UserError, interrupts, user_errors
from qfsdp.common.files import check_folder
from qfsdp.common.output import check_output, outlive_output_errors, print_to
from qfsdp.common.quiet import quiet_torchao
from qfsdp.common.terminal import closed_at_end, say
from qfsdp.config.convert import plain_tree
from qfsdp.config.load import all_told, as_text, check_components, load_config
from qfsdp.config.recipe_files import load_recipe
from qfsdp.config.reference import print_help, wants_help
from qfsdp.hub.download import download, previewed
from qfsdp.hub.upload import check_push, push_results
from qfsdp.launch.lost_peers import lost_peers
from qfsdp.launch.ranks import (
    check_environment,
    check_plain_start,
    leave_process_group,
    local_world_size,
    run_ranks_here,
)
from qfsdp.launch.signals import StopRequest as StopRequest
from qfsdp.launch.watchdog import watched

T = TypeVar("T")


def launch(
    recipe_file: str,
    schema: type[T],
    check: Callable[[T], None],
    main: Callable[[T], None],
    one_process: bool = False,
) -> None:
    """Runs a recipe with the command line's config; the last line of every recipe file.

    Args:
        recipe_file: the recipe's `__file__`.
        schema: its config dataclass.
        check: its preflight, which raises UserError; torchrun's ranks do not repeat it.
        main: the run itself.
        one_process: a plain start makes one rank, however many accelerators there are.

    Ends the process with status 2 and one line on stderr after a UserError.
    """
    with _started(recipe_file, "--config FILE") as argv:
        if argv is None:
            return
        config = load_config(schema, argv)
        _keep_output(config)
        if "LOCAL_RANK" not in os.environ:
            if not one_process:
                check_plain_start(_trains(config))
            checked(check, config)
            if not _trains(config) and (line := unused_driver()) is not None:
                say(line)  # a run's summary tells it
            if not one_process and (count := local_world_size()) > 1:
                return run_ranks_here(count, recipe_file, argv)
        else:
            download(config)
        progress.begin()
        with watched(config), lost_peers():
            main(config)
            leave_process_group()
        push_results()
        if not _trains(config):  # what it prints is its result
            check_output()


def launch_alone(
    recipe_file: str,
    schema: type[T],
    check: Callable[[T], None],
    main: Callable[[T], None],
    words: str | None = None,
) -> None:
    """Runs a recipe that is one process and has no ranks, as `launch` runs others.

    Args:
        words: the key, a list, that words without "=" go to, so that a file or folder can be typed
            as it is; the recipe then needs no config file. None: there is no such key.

    Ends the process with status 2 and one line on stderr after a UserError.
    """
    with _started(recipe_file, "WORD ..." if words else "--config FILE") as argv:
        if argv is None:
            return
        if "LOCAL_RANK" in os.environ:
            name = os.path.basename(recipe_file).removesuffix(".py")
            raise UserError(f"recipes/{name}: it is one process; expected no flags of torchrun")
        config = load_config(schema, argv if words is None else _typed_words(argv, words))
        check(config)
        main(config)
        check_output()


@contextmanager
def _started(recipe_file: str, words: str) -> Iterator[list[str] | None]:
    """A recipe's `with` block, which ends as the head of this file says: its command line, or None
    after the help that it asks for; `words` are what the help shows before `key=value`."""
    argv = sys.argv[1:]
    quiet_torchao()
    outlive_output_errors()
    with user_errors(), interrupts(), closed_at_end():
        if wants_help(argv):
            usage = f"{os.path.basename(recipe_file)} {words} [key=value ...]"
            print_help(usage, recipe_file, argv)
            yield None
            return
        check_environment()
        yield argv


def _typed_words(argv: Sequence[str], key: str) -> list[str]:
    """The words of a command line with those that are no `key=value` as a list in `key`. Raises
    UserError for bytes that are no text."""
    kept, typed = list[str](), list[str]()
    for at, word in enumerate(argv):
        option = word.startswith(("-", "~")) or (at > 0 and argv[at - 1] == "--config")
        (kept if option or "=" in word else typed).append(word)
    if not any(word.partition("=")[0] == "--config" for word in kept):
        kept = ["--config", os.devnull, *kept]
    # YAML reads the escapes of JSON, but not the two of an emoji.
    quoted = yaml.safe_dump(
        [as_text(word, word) for word in typed],
        default_style='"',
        default_flow_style=True,
        width=2**31,
    )
    return [*kept, f"{key}={quoted.strip()}"] if typed else kept


def checked(check: Callable[[T], None], config: T) -> None:
    """Runs a recipe's `check`; what it names on the hub is then downloaded. Raises UserError."""
    if (output_dir := getattr(config, "output_dir", None)) is not None:
        # A file, or a link to nowhere, in place of what is written last would cost the run.
        for name in ("", *(("checkpoints", "adapter", "model") if _trains(config) else ())):
            check_folder("output_dir", Path(output_dir).expanduser() / name)
    try:
        with previewed(config):
            check(config)
            check_push(config)
            download(config)
    except UserError as error:
        raise UserError(all_told([str(error)], plain_tree(config))) from None


def _trains(config: Any) -> bool:
    return hasattr(config, "distributed")


def _keep_output(config: Any) -> None:
    """Lets what training prints go to its folder, once nobody reads it."""
    if _trains(config) and getattr(config, "output_dir", None):
        print_to(Path(config.output_dir).expanduser())


def check_recipe(recipe_file: str | Path, argv: Sequence[str]) -> None:
    """Runs a recipe's preflight: its `Config` from `argv`, then its `check`; raises UserError.

    Does nothing for a recipe without `check`.
    """
    recipe = load_recipe(recipe_file)
    if hasattr(recipe, "check"):
        config = load_config(recipe.Config, argv)
        _keep_output(config)
        checked(recipe.check, config)


def validate_config(config_file: str | Path, recipe_file: str | Path) -> None:
    """Checks a config against a recipe's schema, and its components against their signatures.

    Files that the config names need not exist. Raises UserError.
    """
    schema = load_recipe(recipe_file).Config
    check_components(load_config(schema, ["--config", str(config_file)]))
