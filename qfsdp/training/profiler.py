"""Traces of chosen training steps, to be read in Perfetto (https://ui.perfetto.dev).

<output_dir>/profile/
    step_00000003_rank0.json.gz         what ran when, on the host and on the device
    step_00000003_rank0_memory.pickle   GPUs: every allocation, and who made it; to be read
                                        at https://pytorch.org/memory_viz
"""

from __future__ import annotations

import errno
import gzip
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import profile

from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.distributed.world import World

FOLDER = "profile"


@dataclass
class ProfilerConfig:
    """Section `profiler`: which steps are recorded. A recorded step is slower than others.

    Fields:
        steps: which updates, counted from 1; none: off. The first ones are no example, as
            memory is allocated and kernels are compiled in them.
        ranks: which ranks record them.
        memory: also record allocations: on GPUs as a snapshot with the Python stack of each,
            elsewhere inside the trace.
        stacks: also record where in the Python code each operation was called.
    """

    steps: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [0])
    memory: bool = True
    stacks: bool = False

    def check(self) -> None:
        if any(step < 1 for step in self.steps):
            raise InvalidField("steps", self.steps, "a list of integers of at least 1")
        if any(rank < 0 for rank in self.ranks):
            raise InvalidField("ranks", self.ranks, "a list of integers of at least 0")


class Profiler:
    """Records the chosen steps on the chosen ranks; every rank makes one.

    Args:
        output_dir: of the run. The folder `profile` in it is made when it is needed.

    Raises:
        UserError: a chosen rank is none of `world`.
    """

    def __init__(self, config: ProfilerConfig, output_dir: Path, world: World) -> None:
        for rank in config.ranks:
            if rank >= world.size:
                raise UserError(
                    f"profiler.ranks: {rank}; the ranks of this run are 0 to {world.size - 1}"
                )
        self._steps = frozenset(config.steps if world.rank in config.ranks else ())
        self._snapshot = config.memory and world.device.type == "cuda"
        self._in_trace = config.memory and not self._snapshot
        self._stacks = config.stacks
        self._folder = output_dir / FOLDER
        self._rank = world.rank

    def step(self, step: int) -> AbstractContextManager[None]:
        """To be entered around training step `step`, counted from 1. Does nothing unless it is
        one to record; what cannot be written then is told, and training goes on."""
        return self._record(step) if step in self._steps else nullcontext()

    @contextmanager
    def _record(self, step: int) -> Iterator[None]:
        if self._snapshot:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        try:
            with profile(
                profile_memory=self._in_trace,
                with_stack=self._stacks,
                acc_events=True,  # there is one cycle only; torch 2.11 warns without
            ) as trace:
                yield
            name = f"step_{step:08}_rank{self._rank}"
            written = self._write(f"{name}.json.gz", partial(_write_trace, trace))
            if self._snapshot:
                written += self._write(f"{name}_memory.pickle", torch.cuda.memory._dump_snapshot)
        finally:
            if self._snapshot:
                torch.cuda.memory._record_memory_history(None)
        if written:
            print(f"profile of step {step}: {' '.join(written)}", flush=True)

    def _write(self, name: str, write: Callable[[str], object]) -> list[str]:
        """The file's path; nothing if it could not be written, no part of which is left then."""
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except (OSError, RuntimeError) as error:  # a full disk, told by Python or by PyTorch
            print(f"warning: '{path}' cannot be written: {error}", file=sys.stderr, flush=True)
            with suppress(OSError):
                path.unlink()
            return []
        return [str(path)]


def _write_trace(trace: profile, path: str) -> None:
    """Compresses the trace by ourselves: libkineto, which writes it, keeps it to itself when the
    disk is full, and PyTorch compresses what there is."""
    # A folder, because libkineto writes a file beside the one it was told, and leaves it then.
    with TemporaryDirectory(dir=Path(path).parent) as folder:
        plain = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        if not text.rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with gzip.open(path, "wb") as file:
            file.write(text)
