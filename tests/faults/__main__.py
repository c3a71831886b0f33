"""The fault suite: breaks tiny runs of the real recipes in many ways, and completes them.

    make test-faults [KIND=kill,stop,...] [COUNT=100] [SEED=...] [TRIAL=...]

Each trial must end with the losses and results of an uninterrupted run. Prints a table, and for
each failure the command that repeats it. Exit status 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults import agents, commands, damage, disks, inputs, kills, signals, stops
from tests.faults.runs import Outcome, Trial, Workshop

KINDS: dict[str, Trial] = {
    "kill": kills.trial,
    **commands.KINDS,
    "flip": damage.flips,
    **inputs.KINDS,
    "truncate": damage.truncations,
    "stop": stops.trial,
    "signal": signals.trial,
    "disk": disks.trial,
    "agent": agents.trial,
}
ROW = "{:<14} {:>7} {:>8} {:>10} {:>7} {:>17} {:>8}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-faults", description=__doc__)
    default = [kind for kind in KINDS if kind != "disk" or os.geteuid() == 0]
    parser.add_argument("--kind", default=",".join(default), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--count", type=int, default=100, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--trial", type=int, help="only the trial with this number")
    args = parser.parse_args()
    if unknown := set(args.kind.split(",")) - set(KINDS):
        parser.error(f"KIND: {', '.join(unknown)}; expected some of {', '.join(KINDS)}")
    if len(default) < len(KINDS):
        print("without KIND=disk: only root may mount a small file system")
    print(f"SEED={args.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="qfsdp_faults_"))
    shop, rows, lost, failures = Workshop(folder), [], [], 0
    for kind in args.kind.split(","):
        total, failed, seconds = run_kind(kind, args, shop)
        failures += failed
        rows.append(row(kind, total, failed, seconds))
        times = sorted(Counter(total.lost).items())
        lost.append(f"{kind}: " + ", ".join(f"{count} faults lost {n} steps" for n, count in times))
    heads = ("faults", "noticed", "recovered", "failed", "steps lost", "seconds")
    print(ROW.format("kind", *heads), *rows, *lost, sep="\n")
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


def run_kind(kind: str, args: argparse.Namespace, shop: Workshop) -> tuple[Outcome, int, float]:
    """Runs trials until there were enough faults; the sum of their outcomes, failures, seconds."""
    began, total, failed, number = time.monotonic(), Outcome(), 0, args.trial or 0
    while total.faults + failed < args.count:
        shop.number = args.seed + number
        try:
            outcome = KINDS[kind](random.Random(f"{args.seed} {kind} {number}"), shop)
            total.faults += outcome.faults
            total.noticed += outcome.noticed
            total.recovered += outcome.recovered
            total.lost += outcome.lost
            for note in outcome.notes:
                print(f"{kind} {number}: {note}", flush=True)
        except AssertionError as error:
            failed += 1
            kept = shop.keep(f"{kind}_{number}")
            print(f"FAILED {kind} {number}: {error}\n  its files: {kept}")
            again = f"make test-faults KIND={kind} SEED={args.seed} TRIAL={number}"
            print(f"  to repeat it: {again}", flush=True)
        shop.clean()
        if args.trial is not None:
            break
        number += 1
    return total, failed, time.monotonic() - began


def row(kind: str, total: Outcome, failed: int, seconds: float) -> str:
    lost = total.lost or [0]
    steps = f"{min(lost)} / {sum(lost) / len(lost):.1f} / {max(lost)}"
    counts = (total.faults, total.noticed, total.recovered, failed)
    return ROW.format(kind, *counts, steps, f"{seconds:.0f}")


if __name__ == "__main__":
    sys.exit(main())
