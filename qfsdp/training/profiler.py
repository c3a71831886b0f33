"""Records traces of chosen training steps, for Perfetto (https://ui.perfetto.dev).

<output_dir>/profile/
    step_00000003_rank0.json.gz         operations over time, on the host and on the device
    step_00000003_rank0_memory.pickle   GPUs: every allocation with its Python stack, for
                                        https://pytorch.org/memory_viz
"""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import profile

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.files import not_written, whole_file
from qfsdp.common.terminal import warn
from qfsdp.distributed.world import World

FOLDER = "profile"


@dataclass
class ProfilerConfig:
    """Section `profiler`: which steps are recorded. A recorded step is slower than others.

    Fields:
        steps: updates to record, counted from 1; empty: off. The first ones are not typical:
            they allocate memory and compile kernels.
        ranks: ranks that record them.
        memory: also record allocations: on GPUs as a snapshot with Python stacks, on CPUs inside
            the trace.
        stacks: also record the Python stack of each operation.
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
        output_dir: of the run; the folder `profile` in it is created when needed.

    Raises:
        UserError: a chosen rank does not exist.
    """

    def __init__(self, config: ProfilerConfig, output_dir: Path, world: World) -> None:
        for rank in config.ranks:
            if rank >= world.size:
                raise UserError(
                    f"profiler.ranks: {rank} is not a rank of this run; expected 0 to "
                    f"{world.size - 1}"
                )
        self._steps = frozenset(config.steps if world.rank in config.ranks else ())
        self._snapshot = config.memory and world.device.type == "cuda"
        self._in_trace = config.memory and not self._snapshot
        self._stacks = config.stacks
        self._folder = output_dir / FOLDER
        self._rank = world.rank

    def step(self, step: int) -> AbstractContextManager[None]:
        """A context around training step `step`, counted from 1; records it if it is a chosen one.

        If the disk is full, it prints a warning, and training goes on.
        """
        return self._record(step) if step in self._steps else nullcontext()

    @contextmanager
    def _record(self, step: int) -> Iterator[None]:
        if self._snapshot:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        try:
            with profile(
                profile_memory=self._in_trace,
                with_stack=self._stacks,
                acc_events=True,  # torch 2.11 warns without it; there is only one cycle
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
        """The path of the written file; empty if writing failed, and then no part of it is left."""
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as partial:
                write(str(partial))
        except (OSError, RuntimeError) as error:  # a full disk, in Python or in PyTorch
            with suppress(OSError):
                path.parent.rmdir()  # if it is empty
            warn(not_written(path, error))
            return []
        return [str(path)]


def _write_trace(trace: profile, path: str) -> None:
    """Writes the trace uncompressed, checks that it is complete, and compresses it.

    libkineto does not report a full disk, and PyTorch would compress the incomplete file.
    """
    # In a temporary folder: after a failure libkineto leaves a second file there.
    with TemporaryDirectory(dir=Path(path).parent) as folder:
        plain = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        if not text.rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with gzip.open(path, "wb") as file:
            file.write(text)
