"""Killed agents: torchrun's processes, which start ranks and start them again.

Agents run the command as typed, `qfsdp run --nnodes ...`, in forked processes. Their ranks are
forked too: `ForkedRank` stands in for the `subprocess.Popen` by which torchrun starts them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from tests.faults.moments import Moment
from tests.faults.runs import (
    STEPS,
    Outcome,
    Setup,
    Workshop,
    hear_signals,
    is_running,
    logged,
    newest_step,
    print_to,
    run_rank,
)
from tests.toy_data import Samples, asked_to_stop
from tests.waiting import wait_until

LIMIT = ".limit"
LOCKED = "is being written by"
# A node that is silent for 6 s is gone; torchrun's default is 15 s. The store is another process.
RENDEZVOUS = "is_host=0,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3"


def trial(chance: random.Random, shop: Workshop) -> Outcome:
    return chance.choice([rank_lost, killed_alone, killed_with_its_node])(chance, shop)


# ---- trials --------------------------------------------------------------------------------------


def rank_lost(chance: random.Random, shop: Workshop) -> Outcome:
    """A rank is killed; its agent names it in one line and starts all ranks again."""
    setup, run = Setup(), shop.fresh()
    words = ["resume=auto", "checkpoint.every_n_steps=1"]
    moment, flags = Moment(chance, shop, setup, run, 0), ["--nproc_per_node", "2"]
    agent = start_agent(shop, setup, run, [*flags, "--max-restarts", "1"], words)
    moment.wait(agent)
    wait_until(lambda: bool(agent.ranks()) or not agent.alive(), "ranks start")
    if ranks := sorted(agent.ranks()):
        victim = chance.choice(ranks)
        taken, kept = logged(run), newest_step(run)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    agent.finish()
    note, text = f"one of two ranks, {moment}", agent.text()
    assert agent.process.exitcode == 0, f"{note}: {agent.process.exitcode} {text[-3000:]}"
    shop.check_complete(setup, run)
    if "killed by SIGKILL" not in text:
        return Outcome()
    return Outcome(1, 1, 1, [max(taken - kept, 0)], [note])


def killed_alone(chance: random.Random, shop: Workshop) -> Outcome:
    """The agent of two ranks is killed. Its ranks go on; a second start is refused meanwhile."""
    setup, run = Setup(), shop.fresh()
    words = ["resume=auto", "checkpoint.every_n_steps=1"]
    moment = Moment(chance, shop, setup, run, 0)
    agent = start_agent(shop, setup, run, ["--nproc_per_node", "2"], words)
    moment.wait(agent)
    if not agent.alive():
        assert agent.process.exitcode == 0, agent.text()
        shop.check_complete(setup, run)
        return Outcome()
    agent.kill()
    orphans = agent.ranks()  # the next start lists its own in the same file
    have_ended = lambda: not any(map(is_running, orphans))  # noqa: E731
    note = f"agent of two ranks, {moment}"
    again = start_agent(shop, setup, run, ["--nproc_per_node", "2"], words)
    again.finish()
    refused = again.process.exitcode == 2 and LOCKED in again.text()
    if refused:
        wait_until(have_ended, "the ranks of the killed agent end")
        note += "; the next start was refused until its ranks had ended"
        again = start_agent(shop, setup, run, ["--nproc_per_node", "2"], words)
        again.finish()
    assert again.process.exitcode == 0, f"{note}: {again.process.exitcode} {again.text()[-3000:]}"
    wait_until(have_ended, "the ranks of the killed agent end")
    shop.check_complete(setup, run)
    return Outcome(1, 1, 1, [0], [note])


def killed_with_its_node(chance: random.Random, shop: Workshop) -> Outcome:
    """One of two nodes is gone: its agent and its rank are killed. The other goes on alone until
    the node is back."""
    setup, run, victim = Setup(dropout=0.0), shop.fresh(), chance.randrange(2)
    shop.reference(setup)
    words = ["resume=auto", "checkpoint.every_n_steps=1", "global_batch_size=12"]
    words += ["dataset._component_=tests.faults.agents.HeldSamples"]
    limit = run.with_suffix(LIMIT)
    limit.write_text("3")
    flags = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "9"]
    flags += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{shop.store_port}"]
    flags += ["--rdzv_id", str(chance.random()), "--rdzv_conf", RENDEZVOUS]
    agents = [start_agent(shop, setup, run, flags, words, node) for node in range(2)]
    at = chance.randint(1, 3)
    both_alive = lambda: all(agent.alive() for agent in agents)  # noqa: E731
    wait_until(lambda: logged(run) >= at or not both_alive(), f"step {at} on two nodes")
    note = f"node {victim} of two after step {at}"
    assert both_alive(), f"{note}: {agents[0].text()[-2000:]} {agents[1].text()[-2000:]}"
    agents[victim].kill_with_ranks()
    taken, kept = logged(run), newest_step(run)
    one = agents[1 - victim]
    limit.write_text("6")
    wait_until(lambda: logged(run) > taken or not one.alive(), "a step on one node")
    assert one.alive(), f"{note}: {one.text()[-3000:]}"
    agents[victim] = start_agent(shop, setup, run, flags, words, victim)
    before = one.ranks()
    wait_until(lambda: one.ranks() != before or not both_alive(), "the node is back")
    limit.write_text(str(STEPS))
    for agent in agents:
        agent.finish()
        status = agent.process.exitcode
        assert status == 0, f"{note}: status {status}: {agent.text()[-3000:]}"
    shop.check_complete(setup, run, other_ranks=True)
    return Outcome(1, 1, 1, [max(taken - kept, 0)], [note])


class HeldSamples(Samples):
    """Samples that wait when the run has taken as many steps as it may, which the file $FAULTS_RUN
    with the suffix `LIMIT` says. No arguments: a run does not resume with other ones."""

    def __getitem__(self, index: int) -> Any:
        wait_until(lambda: self._may_take_one() or asked_to_stop(), "the limit is raised")
        return super().__getitem__(index)

    def _may_take_one(self) -> bool:
        run = Path(os.environ["FAULTS_RUN"])
        limit = run.with_suffix(LIMIT).read_text()  # empty while it is written
        return bool(limit) and logged(run) < int(limit)


# ---- processes -----------------------------------------------------------------------------------


@dataclass
class Agent:
    """A running agent. Its ranks write their numbers into a file, because it may be killed."""

    process: Any
    output: Path
    pids: Path

    def alive(self) -> bool:
        return self.process.exitcode is None

    def finish(self) -> None:
        """Waits for its end."""
        wait_until(lambda: not self.alive(), "an agent ends")

    def text(self) -> str:
        """What the agent and its ranks have printed."""
        return self.output.read_text(errors="replace")

    def ranks(self) -> set[int]:
        """The processes of its ranks that run."""
        listed = self.pids.read_text().split() if self.pids.exists() else []
        return {int(pid) for pid in listed if is_running(int(pid))}

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def kill_with_ranks(self) -> None:
        self.kill()
        for pid in self.ranks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_agent(
    shop: Workshop,
    setup: Setup,
    run: Path,
    flags: list[str],
    words: list[str],
    node: int = 0,
    devices: int = 0,
) -> Agent:
    """Starts `qfsdp run FLAGS recipes/... WORDS`.

    Args:
        devices: the number of accelerators that it finds.
    """
    run.mkdir(exist_ok=True)
    output, pids = run.with_name(f"run.out{node or ''}"), run.with_name(f"run.pids{node}")
    pids.unlink(missing_ok=True)
    line = [*flags, f"recipes/{setup.recipe}", *shop.argv(setup, run, *words)]
    environment = os.environ | {"FAULTS_RUN": str(run)}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(
        target=run_agent, args=(line, environment, devices, output, run, pids)
    )
    process.start()
    return Agent(process, output, pids)


def run_agent(
    words: list[str], environment: dict[str, str], devices: int, output: Path, *given: Path
) -> None:
    """Is one agent: `qfsdp run` with `words`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from qfsdp.cli.command import run_command

    os.setsid()
    output.write_text("")
    print_to(output)
    os.environ.clear()
    os.environ.update(environment)
    hear_signals()
    torch.accelerator.device_count = lambda: devices
    ForkedRank.output, (ForkedRank.run, ForkedRank.pids) = output, given
    subprocess_handler.Popen = ForkedRank  # type: ignore[misc, assignment]
    # The ranks come from the server that this process comes from.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    status: Any = 1
    try:
        run_command("qfsdp", ["run", *words])
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status or 0)  # multiprocessing would wait for ranks that are left


class ForkedRank:
    """What torchrun uses of `subprocess.Popen`, for `python -u RECIPE ...`."""

    output, run, pids = Path(), Path(), Path()

    def __init__(self, args: tuple[str, ...], env: dict[str, str], **_: Any) -> None:
        recipe, *argv = args[2:]
        given = (recipe, argv, env, self.output, self.run, 0, os.getpid())
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=run_rank, args=given)
        self._process.start()
        self.args, self.pid = args, self._process.pid
        # torchrun signals the session that its ranks lead, see `run_rank`.
        wait_until(lambda: self.poll() is not None or is_leader(self.pid), "a rank's session")
        with self.pids.open("a") as file:
            file.write(f"{self.pid}\n")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.poll()


def is_leader(pid: int | None) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid or 0) == pid
    return False
