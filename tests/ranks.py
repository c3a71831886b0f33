"""Runs a function on N processes that talk over gloo, one thread each."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks are forked from a server that has imported these, in 4 to 8 s once per test process.
# Two ranks then start and end within 0.15 s, four within 0.3 s.
PRELOADED = [
    "qfsdp.training.validation",
    "qfsdp.planning.preflight",
    "qfsdp.modules.adapters.linears",
    "tests.ranks",
]
# One of gloo's threads was seen to spin for ever; gloo's default limit is half an hour.
COLLECTIVE_LIMIT = timedelta(minutes=10)
# A rank was once ended by glibc ("malloc(): unaligned tcache chunk detected"). The same test passed
# in 140 repetitions, 60 of them with glibc's checks of the heap, and valgrind found nothing wrong.
# So ranks that crash run once more, with a warning; ranks that crash twice fail.
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS")


class _Output:
    """A file descriptor of this process, for a process that the fork server starts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, duplicate: Any) -> None:
        self.fd = duplicate.detach()


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    size: int,
    environment: dict[str, str],
    outputs: tuple[_Output, _Output],
) -> None:
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.fd, fd)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable(sys.__stderr__)  # a process that crashes prints its Python stacks
    torch.set_num_threads(1)  # two ranks with two threads each are slow on two cores
    # Each process would take 10 s or more to build or load its kernels. test_nf4.py tests that
    # compiled and eager kernels give the same bits.
    os.environ.setdefault("QFSDP_EAGER_KERNELS", "1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    if size > 1:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_LIMIT
        )
    torch.save(fn(*args), f"{folder}/{rank}.pt")
    if size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter now and then as it shuts down (1 in 40)


def run_ranks(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `fn(*args)` on every rank of a world of `size`; returns the results, by rank.

    `fn` must be a function of a module, because processes import it. An exception on any rank is
    raised here. If a rank crashes (`CRASHES`), all run once more.
    """
    try:
        return _run_ranks(size, fn, args)
    except mp.ProcessExitedException as error:
        if error.signal_name not in CRASHES:
            raise
        warnings.warn(f"rank {error.error_index}: {error.signal_name}; run again", stacklevel=2)
        return _run_ranks(size, fn, args)


def _join(context: mp.ProcessContext) -> None:
    """Waits for all ranks; raises the error of the first that failed, a crash before the others.

    A rank that loses its connection to a crashed one may end before that one is seen.
    """
    try:
        while not context.join():
            pass
    except mp.ProcessRaisedException as error:
        for rank, process in enumerate(context.processes):
            name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else ""
            if name in CRASHES:
                raise mp.ProcessExitedException(
                    f"process {rank} terminated with signal {name}",
                    rank,
                    process.pid,
                    process.exitcode,
                    name,
                ) from error
        raise


def _run_ranks(size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    multiprocessing.set_forkserver_preload(PRELOADED)
    outputs = (_Output(1), _Output(2))
    with tempfile.TemporaryDirectory() as folder:
        given = (fn, args, folder, size, dict(os.environ), outputs)
        processes = mp.start_processes(
            _rank_main, given, nprocs=size, join=False, start_method="forkserver"
        )
        _join(processes)
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(size)]
