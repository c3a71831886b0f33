"""Ranks of one run: how many there are, how torchrun starts them, and how they end."""

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
    """Leaves the default process group, if `main` has joined it, when all ranks have finished.

    At exit, gloo's threads may still hold a tensor of their last collective. Freeing it while the
    interpreter shuts down aborts the process (SIGABRT): 2 of 12 runs without this function, 6 of
    25 with `destroy_process_group` alone, none of 62 with a barrier, which has no tensor, first.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def local_world_size() -> int:
    """The number of ranks of a plain start: one per visible accelerator, at least one."""
    import torch

    return max(1, torch.accelerator.device_count())


def planned_ranks() -> tuple[int, int]:
    """The number of ranks that a run will have, and the number on this machine.

    Before the ranks start, `torchrun_flags` sets them; else they are those of a plain start.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or local_world_size()
    return int(os.environ.get("WORLD_SIZE", local)), local


@contextmanager
def torchrun_flags(nnodes: str, nproc_per_node: str) -> Iterator[None]:
    """Sets WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun will, while it is entered.

    Args:
        nnodes: torchrun's flag; of "2:4" the lower number counts.
        nproc_per_node: torchrun's flag; words such as "gpu" mean one rank per accelerator.
    """
    local = int(nproc_per_node) if nproc_per_node.isdecimal() else local_world_size()
    sizes = {
        "LOCAL_WORLD_SIZE": str(local),
        "WORLD_SIZE": str(local * int(nnodes.partition(":")[0])),
    }
    before = {name: os.environ.get(name) for name in sizes}
    os.environ.update(sizes)
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
    """Runs torchrun's agent in this process with its parsed flags; exits as `rank_failures`."""
    from torch.distributed.run import run

    if str(args.nproc_per_node).isdecimal():
        share_cores(int(args.nproc_per_node))
    with rank_failures(args.max_restarts):
        run(args)


def share_cores(count: int) -> None:
    """Divides this machine's cores among `count` ranks, unless the user has set the variables.

    torchrun would give each rank one thread and warn. Inductor would start one compile process per
    core, up to 32, in every rank, and each imports torch: five compiled steps on two ranks and two
    cores took 94 s that way, and 77 s with one process, which is the rank itself.
    """
    part = max(1, (os.cpu_count() or 1) // count)
    os.environ.setdefault("OMP_NUM_THREADS", str(part))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(part, 32)))


@contextmanager
def rank_failures(max_restarts: int = 0) -> Iterator[None]:
    """Exits with the status of the first failed rank, or 128 + signal if it was killed.

    torchrun would raise. SIGTERM and SIGINT are passed on to the ranks (`forwarded_to_ranks`).

    Args:
        max_restarts: torchrun's flag, the number of times that it may start all ranks again.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun logs which ranks failed and which it ends. After a UserError these lines would hide
    # the one line that matters; for other failures the table below has the same facts.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    if max_restarts > 0:
        # Without this, new ranks get the store of the failed ones, with their addresses: 4 of 6
        # restarted pairs of gloo ranks could not connect, none of 8 with it (torch 2.11 and 2.13;
        # https://github.com/pytorch/pytorch/issues/135712). Only with restarts, because rank 0
        # then opens a port that the agent found free seconds before.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        with forwarded_to_ranks() as relay:
            yield
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        explained = status == USER_ERROR_STATUS or status == -(relay.received or 0)
        if not explained:  # torchrun's table of failed ranks
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
