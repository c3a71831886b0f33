"""SIGKILL at random moments: while loading, inside a step, inside a save, at the end."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.moments import Moment, random_setup
from tests.faults.runs import STEPS, Outcome, Ranks, Setup, Workshop
from tests.waiting import wait_until


def trial(chance: random.Random, shop: Workshop) -> Outcome:
    """One run that is killed up to four times, and then completed."""
    setup = random_setup(chance)
    run, outcome = shop.fresh(), Outcome()
    words = ["resume=auto", f"checkpoint.every_n_steps={chance.randint(1, 3)}"]
    words += [f"checkpoint.keep_last={chance.randint(1, 2)}"]
    words += [f"checkpoint.asynchronous={chance.choice(['true', 'false'])}"]
    for _ in range(chance.randint(1, 4)):
        saved = shop.check_so_far(setup, run)[1]
        if saved == STEPS:
            break
        ranks, what = kill(chance, shop, setup, run, saved, words)
        statuses = ranks.finish()
        if not any(statuses):
            break  # the run was over before the moment came
        note = f"{setup}, {' '.join(words[1:])}: {what}"
        assert -9 in statuses, f"{note}: {statuses}\n{ranks.text()[-3000:]}"
        taken, kept = shop.check_so_far(setup, run)
        assert kept >= saved, f"step {saved} was saved, now the newest checkpoint is {kept}"
        outcome.faults += 1
        outcome.noticed += 1
        outcome.lost.append(max(taken, saved) - kept)
        outcome.notes.append(f"{note}; {outcome.lost[-1]} steps lost")
    shop.complete(setup, run, *words)
    shop.check_complete(setup, run)
    outcome.recovered = outcome.faults
    return outcome


def kill(
    chance: random.Random, shop: Workshop, setup: Setup, run: Path, saved: int, words: list[str]
) -> tuple[Ranks, str]:
    """Starts ranks and kills one or all of them; returns the ranks, and what was done."""
    victim = chance.choice([None, chance.randrange(setup.ranks)])
    who = "all ranks" if victim is None else f"rank {victim}"
    if chance.random() < 0.7:
        moment = Moment(chance, shop, setup, run, saved)
        ranks = shop.start(setup, run, *words)
        moment.wait(ranks)
        ranks.kill(victim)
        return ranks, f"{who}, {moment}"
    rank = victim or 0
    left = shop.reference(setup).operations[rank] * (STEPS - saved + 1) // (STEPS + 1)
    at = chance.randint(1, max(left, 1))
    ranks = shop.start(setup, run, *words, die_at=(rank, at))
    wait_until(lambda: not ranks.alive(), "a rank kills itself or the run is over")
    if victim is None and any(p.exitcode == -9 for p in ranks.processes):
        ranks.kill()
    return ranks, f"{who}, before file operation {at} of rank {rank} after step {saved}"
