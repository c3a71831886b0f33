"""Tiny runs of the real recipes, on ranks that start in a quarter of a second.

Ranks are forked from a server that has imported everything (importing torch takes 3 to 5 s). They
get the environment that torchrun gives, and run the recipe's file as torchrun does.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from qfsdp.checkpoint.choose import published
from qfsdp.checkpoint.compatibility import read_settings
from qfsdp.checkpoint.state_files import read_trained
from qfsdp.common.files import PARTIAL
from qfsdp.launch.signals import SIGNALS
from tests.tiny import ROOT, write_tiny_model
from tests.toy_data import TOY_CONFIG
from tests.waiting import wait_until

PRELOADED = [
    "tests.faults",
    "qfsdp.training.validation",
    "qfsdp.planning.preflight",
    "qfsdp.modules.adapters.linears",
    "torchtune.training.lr_schedulers",
    "torch.distributed.run",
    "tests.faults.runs",
]
STEPS = 9  # 26 samples, 12 a step: 12, 12 and 2, three times
CONFIG = (
    TOY_CONFIG
    + """\
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
epochs: 3
"""
)
RECIPES = {  # name -> what else its config has, and the file that a complete run leaves
    "qdora_distributed": ("adapter: {rank: 5, alpha: 7}\n", "adapter/adapter_model.safetensors"),
    "full_finetune_distributed": (
        "trainable: {layers: [1]}\nquantization: {format: nf4}\n",
        "model/model.safetensors",
    ),
}
TOLERANCE = 1e-5  # for another number of ranks
PORTS = range(20_000, 30_000)  # below those that the kernel gives to others


@dataclass(frozen=True)
class Setup:
    """What is run: a recipe on a number of ranks. A step has 12 samples on 1, 2, 3, 4 or 6."""

    recipe: str = "qdora_distributed"
    ranks: int = 2
    dropout: float = 0.1  # 0 where the number of ranks changes: each rank draws its own

    def __str__(self) -> str:
        return f"{self.recipe.partition('_')[0]} on {self.ranks}"

    def words(self) -> list[str]:
        """Keys of the command line."""
        more = [f"adapter.dropout={self.dropout}"] if self.recipe == "qdora_distributed" else []
        return [f"batch_size={12 // self.ranks}", *more]

    def result(self, run: Path) -> Path:
        """The file that a complete run has written."""
        return run / RECIPES[self.recipe][1]


@dataclass
class Reference:
    """An uninterrupted run that has kept the checkpoint of every step.

    Fields:
        losses: by step.
        load_s, step_s: seconds until the first step is logged, and of a later step.
        operations: of files in the run's folder, by rank.
    """

    run: Path
    losses: dict[int, float]
    load_s: float
    step_s: float
    operations: list[int]

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step_{step:08d}"


@dataclass
class Ranks:
    """The running ranks of one start."""

    processes: list[Any]
    output: Path
    started: float = field(default_factory=time.monotonic)

    def alive(self) -> bool:
        """Whether every rank still runs."""
        return all(process.exitcode is None for process in self.processes)

    def over(self) -> bool:
        """Whether no rank runs any longer."""
        return all(process.exitcode is not None for process in self.processes)

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank, or to all of them."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def stop(self, rank: int) -> None:
        """Stops a rank, as a debugger or a hung driver does."""
        self.kill(rank, signal.SIGSTOP)

    def finish(self) -> list[int]:
        """Waits for the end of all ranks; after the first failure the others are ended.

        As torchrun does: SIGTERM, and SIGKILL for those that are still there some time later (a
        second here; they may wait in a collective).

        Returns:
            the exit statuses by rank; those of signals are negative.
        """
        failed = lambda: any(p.exitcode not in (None, 0) for p in self.processes)  # noqa: E731
        wait_until(lambda: failed() or self.over(), "the ranks end or one fails")
        if not self.over():
            self.kill(number=signal.SIGTERM)
            end = time.monotonic() + 1
            wait_until(lambda: self.over() or time.monotonic() > end, "the other ranks end")
            self.kill()
            wait_until(self.over, "the killed ranks end")
        return [process.exitcode for process in self.processes]

    def text(self) -> str:
        """What the ranks of this start have printed."""
        return self.output.read_text(errors="replace")


class Workshop:
    """Starts runs in a scratch folder, and knows what they must compute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[Setup, Reference] = {}
        self._starts = 0
        self.number = 0  # grows by 1 from trial to trial of a kind, from its seed
        self.inputs: dict[str, Any] = {}  # of `tests.faults.inputs`, made once
        multiprocessing.set_forkserver_preload(PRELOADED)
        # As torchrun's agents hold one: it outlives the ranks.
        self.store_port = free_port()
        context = multiprocessing.get_context("forkserver")
        self._store = context.Process(target=hold_store, args=(self.store_port,), daemon=True)
        self._store.start()
        write_tiny_model(folder / "model")
        for recipe, (more, _) in RECIPES.items():
            (folder / f"{recipe}.yaml").write_text(CONFIG.format(folder=folder) + more)

    def argv(self, setup: Setup, run: Path, *words: str) -> list[str]:
        """The command line of a run, after the recipe's name."""
        config = str(self.folder / f"{setup.recipe}.yaml")
        return ["--config", config, *setup.words(), f"output_dir={run}", *words]

    def start(
        self, setup: Setup, run: Path, *words: str, die_at: tuple[int, int] | None = None
    ) -> Ranks:
        """Starts the ranks of a run.

        Args:
            die_at: a rank, and the number of the file operation in `run` before which it kills
                itself (SIGKILL).
        """
        run.mkdir(parents=True, exist_ok=True)
        output = run.with_suffix(".out")
        output.write_text("")
        self._starts += 1
        recipe = str(ROOT / "recipes" / f"{setup.recipe}.py")
        port = free_port()
        context, processes = multiprocessing.get_context("forkserver"), []
        for rank in range(setup.ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(setup.ranks),
                "LOCAL_WORLD_SIZE": str(setup.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "False",
                "TORCHELASTIC_RESTART_COUNT": str(self._starts),  # tells starts apart in the store
                "QFSDP_STORE": f"127.0.0.1:{self.store_port}",
            }
            at = die_at[1] if die_at is not None and die_at[0] == rank else 0
            given = (recipe, self.argv(setup, run, *words), environment, output, run, at)
            processes.append(context.Process(target=run_rank, args=given))
            processes[-1].start()
        return Ranks(processes, output)

    def complete(self, setup: Setup, run: Path, *words: str) -> None:
        """Runs to the end; raises AssertionError if a rank fails."""
        ranks = self.start(setup, run, *words)
        statuses = ranks.finish()
        assert not any(statuses), f"the run failed: {statuses}\n{ranks.text()[-3000:]}"

    def reference(self, setup: Setup) -> Reference:
        """The uninterrupted run of a setup, computed once."""
        if setup not in self._references:
            run = self.folder / f"whole_{setup.recipe}_{setup.ranks}_{setup.dropout}"
            words = ["checkpoint.every_n_steps=1", "checkpoint.keep_last=99"]
            began = time.monotonic()
            ranks = self.start(setup, run, *words)
            wait_until(lambda: logged(run) >= 1 or not ranks.alive(), "the first step")
            first = time.monotonic()
            statuses = ranks.finish()
            assert not any(statuses), f"the run failed: {statuses}\n{ranks.text()[-3000:]}"
            counts = [int(operations_file(run, r).read_text()) for r in range(setup.ranks)]
            step_s = (time.monotonic() - first) / STEPS
            found = Reference(run, losses(run), first - began, step_s, counts)
            assert list(found.losses) == list(range(1, STEPS + 1))
            self._references[setup] = found
        return self._references[setup]

    def check_so_far(self, setup: Setup, run: Path) -> tuple[int, int]:
        """Losses and published checkpoints of an interrupted run equal the reference's.

        Returns:
            the last step logged, and the step of the newest checkpoint.
        """
        reference = self.reference(setup)
        done = losses(run)
        assert done == {step: reference.losses[step] for step in done}, f"losses differ: {done}"
        for checkpoint in published(run):
            step = read_settings(checkpoint)["step"]
            own, expected = (
                read_trained(folder / "state")
                for folder in (checkpoint, reference.checkpoint(step))
            )
            assert own.keys() == expected.keys(), checkpoint
            wrong = [name for name in own if not torch.equal(own[name], expected[name])]
            assert not wrong, f"{checkpoint}: {wrong} differ from the uninterrupted run's"
        return max(done, default=0), newest_step(run)

    def check_complete(self, setup: Setup, run: Path, other_ranks: bool = False) -> None:
        """A complete run equals the reference: all losses, and the bytes of the result.

        Args:
            other_ranks: some of its steps had another number of ranks; then losses and result are
                the same within `TOLERANCE`.
        """
        reference = self.reference(setup)
        done, expected = losses(run), reference.losses
        assert done.keys() == expected.keys(), f"steps {list(done)}"
        own, result = setup.result(run), setup.result(reference.run)
        if not other_ranks:
            assert done == expected, f"losses {done}; expected {expected}"
            assert own.read_bytes() == result.read_bytes(), f"{own} differs from {result}"
        else:
            far = {s: done[s] - expected[s] for s in done if abs(done[s] - expected[s]) > TOLERANCE}
            assert not far, f"losses differ by {far}"
        wanted = load_file(result)
        for name, tensor in load_file(own).items():
            assert tensor.isfinite().all(), f"{own}: {name} is not finite"
            error = (tensor - wanted[name]).abs().max().item()
            assert error <= TOLERANCE, f"{own}: {name} differs by {error}"
        left = [str(path) for path in run.rglob(f"*{PARTIAL}*")]
        assert not left, f"left behind: {left}"

    def fresh(self) -> Path:
        """The folder of a new trial's run; that of the trial before is deleted."""
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        return run

    def clean(self) -> None:
        """Ends what a failed trial has left running."""
        for file in self.folder.glob("run.pids*"):  # of ranks that agents have started
            for pid in map(int, file.read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            file.unlink()
        for process in multiprocessing.active_children():
            if process.pid != self._store.pid:
                process.kill()
                process.join()

    def keep(self, name: str) -> Path:
        """Keeps what this trial's run has written, and its output; returns where."""
        kept = self.folder / name
        kept.mkdir(exist_ok=True)
        shutil.copy(self.folder / "run.out", kept)
        if (run := self.folder / "run").exists():  # not if it failed before it wrote
            shutil.copytree(run, kept / "run", dirs_exist_ok=True)
        return kept


def run_rank(
    recipe: str,
    argv: list[str],
    environment: dict[str, str],
    output: Path,
    run: Path,
    die_at: int = 0,
    agent: int = 0,
) -> None:
    """Is one rank: runs a recipe's file in a forked process.

    Args:
        die_at: see `count_operations`.
        agent: the process that stands for its parent, which is the fork server.
    """
    os.setsid()  # as torchrun's ranks
    if agent:
        os.getppid = lambda: agent if is_running(agent) else 1
    print_to(output)
    os.environ.clear()
    os.environ.update(environment)
    hear_signals()
    torch.set_num_threads(1)
    count = count_operations(run, die_at)
    sys.argv = [recipe, *argv]
    runpy.run_path(recipe, run_name="__main__")
    operations_file(run, int(environment["RANK"])).write_text(str(count[0]))
    sys.stdout.flush()


def hear_signals() -> None:
    """Lets this process hear signals that a shell ignores for what it starts with `&`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def operations_file(run: Path, rank: int) -> Path:
    """Where a rank writes the number of its operations: beside the run, whose disk may be full."""
    return run.with_name(f"{run.name}.operations_{rank}")


def hold_store(port: int) -> None:
    """Is the process that holds the store."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    signal.pause()
    del store


def print_to(output: Path) -> None:
    """Appends what this process prints to a file."""
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def count_operations(run: Path, die_at: int) -> list[int]:
    """Counts this process's file operations in `run` (opened, made, linked, renamed, deleted).

    Args:
        die_at: the number of the operation before which the process kills itself; 0 for none.
    """
    count, prefix = [0], f"{run}/"
    names = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
    names |= {"os.link", "os.symlink"}  # which name a source first

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event in names and any(str(arg).startswith(prefix) for arg in args[:2]):
            count[0] += 1
            if count[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    return count


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    start = random.SystemRandom().randrange(len(PORTS))
    for port in (PORTS[(start + i) % len(PORTS)] for i in range(len(PORTS))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def metrics(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's log; a line that is being written does not count."""
    file = run / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def losses(run: Path) -> dict[int, float]:
    """Loss by step. Every number of the log is finite, and no step is there twice."""
    lines = list(metrics(run))
    for line in lines:
        bad = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        assert not bad, f"step {line['step']}: {bad} not finite"
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), f"{run}: steps {steps}"
    return {line["step"]: line["loss"] for line in lines}


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(path.name.removeprefix("step_")) for path in published(run)), default=0)


def logged(run: Path) -> int:
    """The last step in the log; 0 without one."""
    return max((line["step"] for line in metrics(run)), default=0)


Trial = Callable[[random.Random, Workshop], "Outcome"]


@dataclass
class Outcome:
    """What a trial did and found. A trial that finds a mistake raises AssertionError.

    Fields:
        faults: the number of faults caused; 0 if the run ended first.
        noticed: the number of faults that the run reported, by a line or an exit status.
        recovered: the number of faults after which the run was completed with the right results.
        lost: for each fault, the number of steps that were taken a second time.
        notes: for each fault, a line that says where and when it happened.
    """

    faults: int = 0
    noticed: int = 0
    recovered: int = 0
    lost: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
