"""Damage to the newest checkpoint: the run must say so and go on from the one before."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.moments import random_setup
from tests.faults.runs import STEPS, Outcome, Reference, Workshop
from tests.flips import flip

Break = Callable[[random.Random, Path], str]
"""Damages a file, and says how."""


def truncate(chance: random.Random, file: Path) -> str:
    """Cuts a file at a random place, or leaves nothing of it, or of its folder; a file system that
    has lost power may also leave zeros."""
    way, size = chance.choice(["cut", "cut", "zeros", "empty", "missing"]), file.stat().st_size
    length = chance.randrange(size)
    if way == "missing":
        file.unlink()
        return "missing"
    if way == "zeros":
        file.write_bytes(file.read_bytes()[:length] + bytes(size - length))
        return f"zeros from {length} of {size}"
    with file.open("r+b") as stream:
        stream.truncate(0 if way == "empty" else length)
    return f"{way} at {0 if way == 'empty' else length} of {size}"


def flips(chance: random.Random, shop: Workshop) -> Outcome:
    return trial(chance, shop, flip)


def truncations(chance: random.Random, shop: Workshop) -> Outcome:
    return trial(chance, shop, truncate)


def trial(chance: random.Random, shop: Workshop, damage: Break) -> Outcome:
    """One interrupted run, of whose newest checkpoint a random file is damaged; then completed."""
    setup = random_setup(chance)
    reference = shop.reference(setup)
    run, step = shop.fresh(), chance.randint(5, STEPS - 1)
    interrupted(reference, run, step)
    newest = run / "checkpoints" / reference.checkpoint(step).name
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    file = chance.choice(files)
    how = damage(chance, file)
    note = f"{setup}: {file.relative_to(newest)} of {newest.name}: {how}"
    words = ["resume=auto", "checkpoint.every_n_steps=1", "checkpoint.keep_last=2"]
    ranks = shop.start(setup, run, *words)
    statuses = ranks.finish()
    text = ranks.text()
    assert "Traceback" not in text, f"{note}: {text[-3000:]}"
    told = [line for line in text.splitlines() if newest.name in line and "damaged" in line]
    assert len(told) == 1 and file.name in told[0], f"{note}: not told: {text[-3000:]}"
    first = re.search(r"^[\d:]+ step (\d+)/", text, re.MULTILINE)
    assert first is not None and int(first[1]) == step, f"{note}: {text[-3000:]}"
    assert not any(statuses), f"{note}: statuses {statuses}\n{text[-3000:]}"
    shop.check_complete(setup, run)
    return Outcome(1, 1, 1, [1], [note])


def interrupted(reference: Reference, run: Path, step: int) -> None:
    """Makes a run folder as a kill after `step` leaves it, with two checkpoints."""
    for number in (step - 1, step):
        source = reference.checkpoint(number)
        shutil.copytree(source, run / "checkpoints" / source.name)
    lines = (reference.run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:step]))
