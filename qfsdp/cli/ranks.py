"""TODO cli.ranks."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qfsdp.cli.errors import USER_ERROR_STATUS
from qfsdp.cli.signals import forwarded_to_ranks


def leave_process_group() -> None:
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
    """Sets WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun will, while it is entered.


    Args:
        nnodes: torchrun's flag; of "2:4" the lower number counts.
        nproc_per_node: torchrun's flag; words such as "gpu" count as one rank per accelerator.

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


def run_ranks_here(count: int, recipe_file: str, argv: Sequence[str]) -> None:
    """Runs a recipe on `count` ranks of this machine."""
    from torch.distributed.run import parse_args

    recipe = os.path.abspath(recipe_file)
    run_ranks(parse_args(["--standalone", "--nproc_per_node", str(count), recipe, *argv]))


def run_ranks(args: Namespace) -> None:
    """Runs torchrun's agent in this process, as its flags `args` say; exits as `rank_failures`."""
    from torch.distributed.run import run

    if str(args.nproc_per_node).isdecimal():
        share_cores(int(args.nproc_per_node))
    with rank_failures(args.max_restarts):
        run(args)


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
