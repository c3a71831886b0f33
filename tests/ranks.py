"""Runs a function on N processes that talk over gloo, one thread each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank_main(rank: int, fn: Callable[..., Any], args: tuple[Any, ...], folder: str, size: int):
    torch.set_num_threads(1)  # two busy ranks with two threads each on two cores crawl
    # Each process would spend 10 s and more on building or loading its kernels; that compiled
    # and eager kernels give the same bits has a test of its own (test_nf4.py).
    os.environ.setdefault("QFSDP_EAGER_KERNELS", "1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    if size > 1:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.save(fn(*args), f"{folder}/{rank}.pt")
    if size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter now and then as it shuts down (1 in 40)


def run_ranks(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(*args)` on every rank of a world of `size`; the results, by rank.

    `fn` must be importable (a function of a module, as processes are spawned); an exception
    on any rank is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank_main, (fn, args, folder, size), nprocs=size, start_method="spawn")
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(size)]
