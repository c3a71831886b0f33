"""SIGSTOP of one rank at random moments: the others must say which, and end with status 75."""

from __future__ import annotations

import random

from tests.faults.moments import Moment, random_setup
from tests.faults.runs import Outcome, Workshop
from tests.waiting import wait_until

# Loading may be as slow as the machine is; nothing of it takes as long at once.
LIMITS = ["distributed.timeout=5s", "distributed.first_timeout=10s"]
HUNG_STATUS = 75


def trial(chance: random.Random, shop: Workshop) -> Outcome:
    """One run of which a rank is stopped; then completed."""
    setup = random_setup(chance, fewest_ranks=2)
    run, victim = shop.fresh(), chance.randrange(setup.ranks)
    words = ["resume=auto", "checkpoint.every_n_steps=1", *LIMITS]
    moment = Moment(chance, shop, setup, run, 0)
    ranks = shop.start(setup, run, *words)
    moment.wait(ranks)
    ranks.stop(victim)
    wait_until(lambda: not ranks.alive(), "the ranks end that wait for the stopped one")
    others = [p for rank, p in enumerate(ranks.processes) if rank != victim]
    wait_until(lambda: all(p.exitcode is not None for p in others), "the other ranks end")
    ranks.kill(victim)
    ranks.finish()
    statuses, text = [p.exitcode for p in others], ranks.text()
    note = f"{setup}: rank {victim}, {moment}"
    if not any(statuses):
        shop.check_complete(setup, run)
        return Outcome()  # it was over before the moment came
    assert HUNG_STATUS in statuses, f"{note}: {statuses}\n{text[-3000:]}"
    assert f"rank {victim} did not arrive" in text, f"{note}: {text[-3000:]}"
    taken, kept = shop.check_so_far(setup, run)
    shop.complete(setup, run, *words)
    shop.check_complete(setup, run)
    return Outcome(1, 1, 1, [taken - kept], [note])
