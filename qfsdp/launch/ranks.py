"""Ranks of one run: how many there are, how torchrun starts them, and how they end."""

from __future__ import annotations

import logging
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qfsdp.common.devices import accelerator_count, cores
from qfsdp.common.errors import USER_ERROR_STATUS, UserError
from qfsdp.common.terminal import warn
from qfsdp.launch.lost_peers import LOST_PEER_STATUS
from qfsdp.launch.nodes import set_rendezvous, used_port
from qfsdp.launch.signals import forwarded_to_ranks
from qfsdp.launch.watchdog import HANG_STATUS

INTERFACES = "GLOO_SOCKET_IFNAME"
NODES = "QFSDP_NNODES"  # torchrun's --nnodes, while a config is checked
MOST_NODES = 1000  # of "1:1000000", the numbers that are checked
RANK_WORDS = ("cpu", "gpu", "auto", "xpu")  # of torchrun's --nproc_per_node
MOST_RANKS_PER_CORE = 32  # a rank takes 0.3 GB; more is a mistyped number
COPIES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun and mpirun
EXPLAINED = (USER_ERROR_STATUS, HANG_STATUS, LOST_PEER_STATUS)  # told in one line already


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
    return max(1, accelerator_count())


def planned_ranks() -> tuple[int, int]:
    """The number of ranks that a run will have, and the number on this machine.

    Before the ranks start, `torchrun_flags` sets them; else they are those of a plain start.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or local_world_size()
    return int(os.environ.get("WORLD_SIZE", local)), local


def check_environment() -> None:
    """Checks variables that torchrun and sbatch scripts set. Raises UserError: one is no number, or
    several ranks are to use a network interface that this machine does not have."""
    for name, least in (("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        text = os.environ.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and int(text) >= least):
            expected = f"an integer of at least {least}, or `unset {name}`"
            raise UserError(f"{name}: {text!r} in the environment; expected {expected}")
    given, here = os.environ.get(INTERFACES, ""), [name for _, name in socket.if_nameindex()]
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and given and not {*given.split(",")} <= {*here}:
        expected = f"expected some of {', '.join(here)}, or `unset {INTERFACES}`"
        raise UserError(f"{INTERFACES}: {given!r} in the environment; {expected}")


def check_plain_start(trains: bool) -> None:
    """Checks a start without torchrun's flags, which starts the ranks of this machine alone. Warns
    of a training command that srun or mpirun has started several times.

    Raises:
        UserError: a cluster's variables name several machines, and each would train on its own.
            A machine with one device is no error if `WORLD_SIZE` is set: its process is one rank.
    """
    count, world = local_world_size(), os.environ.get("WORLD_SIZE", "1")
    # torchrun's --nnodes, if there are flags; or that of LLaMA-Factory and others
    key = "NNODES" if "NODE_RANK" in os.environ and "NNODES" in os.environ else "PET_NNODES"
    nodes = os.environ.get(key, "1")
    alone = world == "1" and nodes != "1" and numbers_of_nodes(nodes)[-1] > 1
    for name, value, wrong in ((key, nodes, alone), ("WORLD_SIZE", world, world != "1")):
        if wrong and (count > 1 or (trains and alone)):
            flags = "--nnodes N --node_rank I --master_addr HOST --nproc_per_node COUNT"
            given = f"{name}: {value!r} in the environment, as on one of several machines"
            raise UserError(f"{given}; expected `tune run {flags} ...`, or `unset {name}`")
    copies = next((name for name in COPIES if os.environ.get(name, "1") != "1"), None)
    if copies is not None and trains and world == "1":
        each = f"{copies}: {os.environ[copies]} commands were started, and each trains on its own"
        warn(f"{each}; `tune run --nproc_per_node N ...` starts N ranks of one run")


def check_one_process() -> None:
    """Raises UserError if torchrun's flags ask for several ranks of a recipe that has one."""
    if (ranks := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise UserError(f"--nproc_per_node: {ranks} ranks; expected 1, or no flags of torchrun")


def numbers_of_nodes(nnodes: str) -> range:
    """The numbers of machines that torchrun's flag --nnodes allows: "2", or "1:4" for 1 to 4.
    Raises UserError: it is neither."""
    least, colon, most = nnodes.partition(":")
    if len(nnodes) < 20 and _is_count(least) and _is_count(most if colon else "1"):
        allowed = range(int(least), int(most or least) + 1)
        if allowed:
            return allowed
    expected = "a number of machines, such as 2, or the least and the most, such as 1:4"
    raise UserError(f"--nnodes: {nnodes[:50]!r} is not valid; expected {expected}")


def number_of_ranks(nproc_per_node: str) -> int:
    """The ranks on this machine that torchrun's flag --nproc_per_node asks for; words such as "gpu"
    mean one per accelerator. Raises UserError: it is no number and none of torchrun's words, or
    above `MOST_RANKS_PER_CORE` for each core of the machine."""
    if nproc_per_node in RANK_WORDS:
        return local_world_size()
    most = MOST_RANKS_PER_CORE * cores()
    if len(nproc_per_node) < 10 and _is_count(nproc_per_node) and int(nproc_per_node) <= most:
        return int(nproc_per_node)
    expected = f"a number from 1 to {most}, or one of {', '.join(RANK_WORDS)}"
    raise UserError(f"--nproc_per_node: {nproc_per_node[:50]!r} is not valid; expected {expected}")


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and int(word) > 0


def possible_numbers_of_ranks() -> list[int]:
    """All numbers of ranks that a run may have: several if `torchrun_flags` has set "2:4"."""
    ranks, local = planned_ranks()
    if NODES not in os.environ:
        return [ranks]
    return [local * nodes for nodes in numbers_of_nodes(os.environ[NODES])[:MOST_NODES]]


@contextmanager
def torchrun_flags(nnodes: str, nproc_per_node: str) -> Iterator[None]:
    """Sets WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun will, while it is entered, and `NODES`.

    Args:
        nnodes: torchrun's flag; of "2:4" the lower number counts.
        nproc_per_node: torchrun's flag; words such as "gpu" mean one rank per accelerator.

    Raises:
        UserError: a flag is not valid.
    """
    local, nodes = number_of_ranks(nproc_per_node), numbers_of_nodes(nnodes)
    sizes = {"LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(local * nodes[0]), NODES: nnodes}
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
    args = parse_args(["--nproc_per_node", str(count), recipe, *argv])
    set_rendezvous(args, numbers_of_nodes("1"))
    run_ranks(args)


def run_ranks(args: Namespace) -> None:
    """Runs torchrun's agent in this process with its parsed flags; exits as `rank_failures`."""
    from torch.distributed.run import run

    from qfsdp.launch.agent import our_agent  # imports torch

    share_cores(number_of_ranks(str(args.nproc_per_node)))
    elastic = args.max_restarts > 0 or len(numbers_of_nodes(str(args.nnodes))) > 1
    with rank_failures(elastic), our_agent():
        run(args)


def share_cores(count: int) -> None:
    """Divides the cores that this process may use among `count` ranks, unless the user has set the
    variables.

    torchrun would give each rank one thread and warn. Inductor would start one compile process per
    core, up to 32, in every rank, and each imports torch: five compiled steps on two ranks and two
    cores took 94 s that way, and 77 s with one process, which is the rank itself.
    """
    part = max(1, cores() // count)
    os.environ.setdefault("OMP_NUM_THREADS", str(part))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(part, 32)))


@contextmanager
def rank_failures(elastic: bool = False) -> Iterator[None]:
    """Exits with the status of the first failed rank, or 128 + signal if it was killed.

    torchrun would raise. The signals that ask a run to end are passed on (`forwarded_to_ranks`).

    Args:
        elastic: all ranks may start again, after a failure or with another number of machines.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    # torchrun logs which ranks failed and which it ends. `qfsdp.launch.agent` says it in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if elastic:
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
        explained = status in EXPLAINED or status == -(relay.received or 0)
        if not explained:  # torchrun's table of failed ranks
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except DistNetworkError as error:
        if (used := used_port(error, "--master_port")) is None:
            raise
        raise used from None
    except RendezvousError as error:
        reason = f"{type(error).__name__} {error}".strip()
        what = "the other machines cannot be reached, or have ended the run"
        print(f"error: {what} ({reason})", file=sys.stderr)
        raise SystemExit(LOST_PEER_STATUS) from None
