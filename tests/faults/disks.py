"""A disk that is full at a random moment: a run ends with one line or goes on with a warning."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.moments import random_setup
from tests.faults.runs import Outcome, Workshop


def trial(chance: random.Random, shop: Workshop) -> Outcome:
    """One run on a file system of a random size; then the file system grows, and the run is
    completed."""
    setup = random_setup(chance)
    reference, run = shop.reference(setup), shop.fresh()
    saved = folder_size(reference.checkpoint(1))
    result = folder_size(setup.result(reference.run).parent)
    # Two checkpoints, one being written and the result fit into the largest.
    size = chance.randint(4096, 3 * saved + result)
    on_failure = chance.choice(["stop", "continue"])
    words = ["resume=auto", "checkpoint.every_n_steps=1", f"checkpoint.on_failure={on_failure}"]
    note = f"{setup}, {words[-1]}: {size:,} bytes"
    with small_disk(run, size):
        ranks = shop.start(setup, run, *words)
        statuses, text = ranks.finish(), ranks.text()
        assert "Traceback" not in text, f"{note}: {text[-3000:]}"
        told = [s for s in text.splitlines() if s.startswith(("error: ", "warning: "))]
        if not told:
            assert not any(statuses), f"{note}: {statuses}\n{text[-3000:]}"
            shop.check_complete(setup, run)
            return Outcome()  # it was not full
        assert set(statuses) <= {0, 2, -15, -9}, f"{note}: {statuses}\n{text[-3000:]}"
        taken, kept = shop.check_so_far(setup, run)
        subprocess.run(["mount", "-o", "remount,size=1G", str(run)], check=True)
        shop.complete(setup, run, *words)
        shop.check_complete(setup, run)
    return Outcome(1, 1, 1, [max(taken - kept, 0)], [f"{note}: {told[0]}"])


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Mounts a file system in memory with `size` bytes; needs the right to mount."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))
