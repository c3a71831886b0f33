"""How a recipe file becomes running processes, and how its errors become exit statuses.

Every recipe ends with `launch(__file__, Config, check, main)`. Started plainly, it checks the
config once, then starts itself on every accelerator of the machine; started by torchrun (or
`tune run --nproc_per_node N`), it is one of the ranks and just runs. `check_recipe` and
`validate_config` do the checking for the `tune` command, before any rank exists.

Exit statuses: 0, 2 after a `UserError`, that of SIGINT after a Ctrl-C, else what the first failed
rank ended with. A run that SIGTERM or SIGINT has stopped, and that has saved, ends with 0
(`qfsdp.signals`).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from qfsdp.config import check_components, load_config
from qfsdp.errors import UserError
from qfsdp.signals import forwarded_to_ranks
from qfsdp.tune_hook import quiet_torchao

T = TypeVar("T")

USER_ERROR_STATUS = 2
# All ranks usually meet the same mistake. Rank 0 tells it at once and torchrun then ends the
# others; one that is still alive after this many seconds met a mistake of its own.
_RANK_0_GOES_FIRST_S = 2.0


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
                return _run_ranks(count, recipe_file, argv)
        from qfsdp.memory.oom import explain_oom

        with explain_oom(config):
            main(config)
        _leave_process_group()


def _leave_process_group() -> None:
    """Ends what `main` may have joined, once all ranks are through.

    At exit gloo's threads may still hold a tensor of their last collective, and dropping it
    while the interpreter goes down is SIGABRT: 2 of 12 runs without this, 6 of 25 with
    `destroy_process_group` alone, none of 62 with a barrier, which has no tensor, before it.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def local_world_size() -> int:
    """How many processes a plain start makes: one per visible accelerator, at least one."""
    import torch

    return max(1, torch.accelerator.device_count())


def planned_ranks() -> tuple[int, int]:
    """How many ranks a run will have, and how many of them on this machine.

    For what is checked before they start: by torchrun's flags (`torchrun_flags`), or as a plain
    start makes them.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or local_world_size()
    return int(os.environ.get("WORLD_SIZE", local)), local


@contextmanager
def torchrun_flags(nnodes: str, nproc_per_node: str) -> Iterator[None]:
    """Within it, the environment says of the ranks' number what torchrun will tell them.

    Of "2:4" machines the fewest count; "gpu" and "auto" are what a plain start makes.
    """
    local = int(nproc_per_node) if nproc_per_node.isdecimal() else local_world_size()
    told = {
        "LOCAL_WORLD_SIZE": str(local),
        "WORLD_SIZE": str(local * int(nnodes.partition(":")[0])),
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_ranks(count: int, recipe_file: str, argv: Sequence[str]) -> None:
    from torch.distributed.run import parse_args, run

    share_cores(count)
    with rank_failures():
        recipe = os.path.abspath(recipe_file)
        run(parse_args(["--standalone", "--nproc_per_node", str(count), recipe, *argv]))


def share_cores(count: int) -> None:
    """Gives each of `count` ranks its part of this machine's cores, unless the user has.

    torchrun would give each one thread and warn; the host's part of a step wants its cores. And
    each would compile in a process for every core, up to 32, that all import torch: with one,
    which is the rank itself, five compiled steps on two ranks and two cores took 77 s, not 94.
    """
    part = max(1, (os.cpu_count() or 1) // count)
    os.environ.setdefault("OMP_NUM_THREADS", str(part))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(part, 32)))


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns a UserError into `error: <message>` on stderr and exit status 2."""
    try:
        yield
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_RANK_0_GOES_FIRST_S)
        told_by = "" if rank == "0" else f"rank {rank}: "
        sys.stdout.flush()
        print(f"error: {told_by}{error}", file=sys.stderr, flush=True)
        if "LOCAL_RANK" in os.environ:
            os._exit(USER_ERROR_STATUS)  # past gloo's threads, see `_leave_process_group`
        raise SystemExit(USER_ERROR_STATUS) from None


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


@contextmanager
def rank_failures(max_restarts: int = 0) -> Iterator[None]:
    """Exits as the first failed rank did, where torchrun would raise; 128 + signal if killed.

    The ranks that are started inside get SIGTERM and SIGINT, and may end in their own way.

    Args:
        max_restarts: torchrun's flag, how often it may start all ranks again.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Its lines on which rank has failed and which are ended would stand around the one line that
    # a rank has told; of any other failure the table below says as much.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    if max_restarts > 0:
        # The agent would give new ranks the store of those that have died, with their addresses
        # in it: 4 of 6 restarted pairs of gloo ranks could not connect, none of 8 with this
        # (torch 2.11 and 2.13; https://github.com/pytorch/pytorch/issues/135712). Not always,
        # because rank 0 then opens a port that the agent found free seconds before.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        with forwarded_to_ranks() as relay:
            yield
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        told = status == USER_ERROR_STATUS or status == -(relay.received or 0)
        if not told:  # torchrun's table of who failed
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


def is_recipe(path: str | Path) -> bool:
    """Whether a file is a qfsdp recipe: whether it ends in a call that all of them end in, this
    module's or that of tools (`qfsdp.memory.training_config`)."""
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
