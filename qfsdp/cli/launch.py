"""How a recipe file becomes running processes, and how its errors become exit statuses.

Every recipe ends with `launch(__file__, Config, check, main)`. Started plainly, it checks the
config once, then starts itself on every accelerator of the machine; started by torchrun (or
`tune run --nproc_per_node N`), it is one of the ranks and just runs. `check_recipe` and
`validate_config` do the checking for the `tune` command, before any rank exists.

Exit statuses: 0, 2 after a `UserError`, that of SIGINT after a Ctrl-C, else what the first failed
rank ended with. A run that SIGTERM or SIGINT has stopped, and that has saved, ends with 0
(`qfsdp.cli.signals`).
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
        check: its own preflight, which raises UserError; not run again on torchrun's ranks.
        main: the recipe.

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
    """Ends the process by SIGINT itself after a Ctrl-C that nobody has taken, without a traceback.

    Python does so by itself, but not where something that runs at exit calls `exec`, as packages
    that torch imports where they are installed do: then the status is 1, a failure.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def check_recipe(recipe_file: str | Path, argv: Sequence[str]) -> None:
    """A recipe's preflight: its `Config` from `argv`, then its `check`; raises UserError.

    Does nothing for a recipe that lacks one of the two names.
    """
    recipe = load_recipe(recipe_file)
    schema, check = getattr(recipe, "Config", None), getattr(recipe, "check", None)
    if schema is not None and check is not None:
        check(load_config(schema, argv))


def validate_config(config_file: str | Path, recipe_file: str | Path) -> None:
    """Checks a config against a recipe's schema and its components against their signatures.

    Files that the config names need not exist. Raises UserError.
    """
    schema = load_recipe(recipe_file).Config
    check_components(load_config(schema, ["--config", str(config_file)]))
