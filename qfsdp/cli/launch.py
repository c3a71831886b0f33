"""Starts a recipe: checks its config, starts its ranks, and ends with an exit status.

Every recipe ends with `launch(__file__, Config, check, main)`. A plain start checks the config
once, then starts the recipe on every accelerator of the machine. A process of torchrun (or of
`tune run --nproc_per_node N`) is one of the ranks and runs `main`. `check_recipe` and
`validate_config` check a config for the command, before any rank exists.

Exit statuses: 0; 2 after a UserError; that of SIGINT after Ctrl-C; else that of the first failed
rank. A run that has saved after SIGTERM or SIGINT ends with 0 (`qfsdp.cli.signals`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from qfsdp.cli.config import check_components, load_config
from qfsdp.cli.errors import user_errors
from qfsdp.cli.quiet import quiet_torchao
from qfsdp.cli.ranks import leave_process_group, local_world_size, run_ranks_here
from qfsdp.cli.recipes import load_recipe

T = TypeVar("T")


def launch(
    recipe_file: str, schema: type[T], check: Callable[[T], None], main: Callable[[T], None]
) -> None:
    """Runs a recipe with the command line's config; the last line of every recipe file.

    Args:
        recipe_file: the recipe's `__file__`.
        schema: its config dataclass.
        check: its preflight, which raises UserError; torchrun's ranks do not repeat it.
        main: the run itself.

    Ends the process with status 2 and one line on stderr after a UserError.
    """
    argv = sys.argv[1:]
    quiet_torchao()
    with user_errors(), interrupts():
        config = load_config(schema, argv)
        if "LOCAL_RANK" not in os.environ:
            check(config)
            if (count := local_world_size()) > 1:
                return run_ranks_here(count, recipe_file, argv)
        main(config)
        leave_process_group()


@contextmanager
def interrupts() -> Iterator[None]:
    """After an unhandled Ctrl-C, ends the process by SIGINT, without a traceback.

    Python does so too, unless a function at exit calls `exec`, as packages do that torch imports if
    they are installed. Then the status would be 1, a failure.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def check_recipe(recipe_file: str | Path, argv: Sequence[str]) -> None:
    """Runs a recipe's preflight: its `Config` from `argv`, then its `check`; raises UserError.

    Does nothing for a recipe without `check`.
    """
    recipe = load_recipe(recipe_file)
    if hasattr(recipe, "check"):
        recipe.check(load_config(recipe.Config, argv))


def validate_config(config_file: str | Path, recipe_file: str | Path) -> None:
    """Checks a config against a recipe's schema, and its components against their signatures.

    Files that the config names need not exist. Raises UserError.
    """
    schema = load_recipe(recipe_file).Config
    check_components(load_config(schema, ["--config", str(config_file)]))
