"""Signals that ask a run to save and end: the run says which one, loses no step, and goes on.

A trial starts a run in every way of `WAYS` and sends each one of the nine signals. The next trial
sends the next signals, so nine trials send all to all. The note of each is a row of a table.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qfsdp.launch.signals import SIGNALS
from tests.faults.agents import LIMIT, Agent, start_agent
from tests.faults.moments import Moment
from tests.faults.runs import STEPS, Outcome, Setup, Workshop, logged
from tests.waiting import wait_until

HELD = "dataset._component_=tests.faults.agents.HeldSamples"


@dataclass(frozen=True)
class Way:
    """How a run is started, and who gets the signal.

    Fields:
        flags: of torchrun.
        devices: the number of accelerators that a start without flags sees.
        to: "group" is what a terminal, `timeout` and a plain `kill` reach: torchrun's ranks lead
            groups of their own. "all" is what Slurm reaches. "rank" is one rank alone.
    """

    flags: tuple[str, ...] = ()
    devices: int = 0
    to: str = "group"

    @property
    def setup(self) -> Setup:
        return Setup(ranks=2 if self.flags or self.devices else 1)


TORCHRUN = ("--nproc_per_node", "2")
WAYS = {
    "one process": Way(),
    "two ranks": Way(devices=2),
    "torchrun": Way(TORCHRUN),
    "torchrun, all processes": Way(TORCHRUN, to="all"),
    "torchrun, one rank": Way(TORCHRUN, to="rank"),
}


def trial(chance: random.Random, shop: Workshop) -> Outcome:
    """A run in every way, each with another signal; and one at a random moment."""
    total = Outcome()
    for at, (name, way) in enumerate(WAYS.items()):
        number = SIGNALS[(shop.number + at) % len(SIGNALS)]
        add(total, after_a_step(chance, shop, way, number), f"{number.name:<8} {name:<24}")
    number, name = chance.choice(SIGNALS), chance.choice(list(WAYS))
    add(total, any_time(chance, shop, WAYS[name], number), f"{number.name:<8} {name:<24}")
    return total


def add(total: Outcome, one: Outcome, head: str) -> None:
    """Adds the outcome of a run."""
    total.faults += one.faults
    total.noticed += one.noticed
    total.recovered += one.recovered
    total.lost += one.lost
    total.notes += [f"{head} {note}" for note in one.notes]


def after_a_step(
    chance: random.Random, shop: Workshop, way: Way, number: signal.Signals
) -> Outcome:
    """The run waits after a random step, and its only checkpoint is that of the signal."""
    run, words = shop.fresh(), ["resume=auto", "checkpoint.every_n_steps=null", HELD]
    limit, step = run.with_suffix(LIMIT), chance.randint(1, STEPS - 2)
    limit.write_text(str(step))
    agent = start(shop, way, run, words)
    wait_until(lambda: logged(run) >= step or not agent.alive(), f"step {step}")
    assert agent.alive(), agent.text()[-3000:]
    send(chance, agent, way, number)
    if way.to == "rank":
        limit.write_text(str(STEPS))  # the other rank waits for nothing else
    agent.finish()
    taken, kept = shop.check_so_far(way.setup, run)
    status, text = agent.process.exitcode, agent.text()
    note = f"{number.name} after step {step}: status {status}, step {taken}, saved {kept}"
    assert status == 0 and step <= taken < STEPS and kept == taken, f"{note}: {text[-3000:]}"
    told = f"{number.name}: saving after step {taken}, then stopping"
    assert text.count(told) == 1 and "Traceback" not in text, f"{note}: {text[-3000:]}"
    limit.write_text(str(STEPS))
    complete(shop, way, run, words)
    return Outcome(1, 1, 1, [0], [f"after step {taken}: saved, status 0, 0 steps lost"])


def any_time(chance: random.Random, shop: Workshop, way: Way, number: signal.Signals) -> Outcome:
    """A signal while the run loads, saves, or writes its result."""
    run = shop.fresh()
    words = ["resume=auto", f"checkpoint.every_n_steps={chance.choice(['1', '3', 'null'])}"]
    moment = Moment(chance, shop, way.setup, run, 0)
    agent = start(shop, way, run, words)
    moment.wait(agent)
    send(chance, agent, way, number)
    agent.finish()
    taken, kept = shop.check_so_far(way.setup, run)
    status, text = agent.process.exitcode, agent.text()
    note = f"{moment}: status {status}, step {taken}, saved {kept}"
    assert status in (0, 128 + number, -number), f"{note}: {text[-3000:]}"
    assert kept == taken and "Traceback" not in text, f"{note}: {text[-3000:]}"
    complete(shop, way, run, words)
    return Outcome(1, 1, 1, [taken - kept], [note])


def start(shop: Workshop, way: Way, run: Path, words: list[str]) -> Agent:
    return start_agent(shop, way.setup, run, list(way.flags), words, devices=way.devices)


def complete(shop: Workshop, way: Way, run: Path, words: list[str]) -> None:
    """The same command ends with the losses and the result of an undisturbed run."""
    agent = start(shop, way, run, words)
    agent.finish()
    assert agent.process.exitcode == 0, agent.text()[-3000:]
    shop.check_complete(way.setup, run)


def send(chance: random.Random, agent: Agent, way: Way, number: signal.Signals) -> None:
    """Sends the signal to those that get it."""
    ranks = sorted(agent.ranks())
    with suppress(ProcessLookupError):
        if way.to != "rank" or not ranks:
            os.killpg(agent.process.pid, number)
    for pid in {"group": [], "all": ranks, "rank": ranks and [chance.choice(ranks)]}[way.to]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
