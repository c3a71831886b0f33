"""What tells whether code works on a GPU, all at once: tests, recipes, two ranks, the doctor.

    python benchmarks/gpu_checks.py [--quick] [--json checks.json]

These checks wait for compilers and the host more than for the card, and none is a timing. So they
run at the same time: all tests in `SHARES` processes, `gpu_recipes.py`, `gpu_two_ranks.py` and
`gpu_doctor.py`. The figures of the scripts keep their names. Those of tests add up to
`tests_passed`, `tests_failed`, `tests_skipped` and `tests_left`, those that had not ended. Figures
are written meanwhile. `--quick` tries the script on a CPU, with a few tests and the doctor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_tests import OUTCOMES
from benchmarks.timing import base_arguments, tell, write_figures

HERE = Path(__file__).parent
SHARES = 5
SAVED_EVERY = 5.0  # seconds


def commands(quick: bool) -> dict[str, list[str]]:
    """Name -> a script and its arguments."""
    if quick:  # the others are parts of their own
        tests = ["gpu_tests.py", "--on-cpu", "-k", "bits_of_bitsandbytes and dtype0"]
        return {"doctor": ["gpu_doctor.py", "--quick"], "tests": tests}
    names = ("recipes", "two_ranks", "doctor")
    found = {name: [f"gpu_{name}.py"] for name in names}
    for share in range(SHARES):
        found[f"tests_{share}"] = ["gpu_tests.py", "--share", f"{share}/{SHARES}"]
    return found


def gathered(folder: Path) -> dict[str, Any]:
    """The figures of all commands so far; those of tests added up."""
    found, tests = dict[str, Any](), dict[str, Any]()
    for file in sorted(folder.glob("*.json")):
        figures = json.loads(file.read_text())
        of_tests = figures.pop("tests", None)
        if of_tests is None:
            found |= figures
        else:
            tests |= of_tests
    kinds = [kind for kind, _ in tests.values()]
    found |= {f"tests_{kind}": kinds.count(kind) for kind in OUTCOMES}
    return found | {"tests_left": kinds.count("running"), "tests": tests}


def main() -> None:
    args = base_arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder, running = Path(work), dict[str, Any]()
        for name, words in commands(args.quick).items():
            script, *rest = words
            line = [sys.executable, str(HERE / script), "--json", f"{folder}/{name}.json", *rest]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            with open(folder / f"{name}.log", "w") as log:
                running[name] = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
        since = time.monotonic()
        while running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                status = running.pop(name).returncode
                print(f"== {name}: status {status}, {time.monotonic() - since:.0f} s")
                print((folder / f"{name}.log").read_text(errors="replace")[-8000:], flush=True)
            write_figures(args.json, gathered(folder))
            time.sleep(0.2 if args.quick else SAVED_EVERY)
        found = gathered(folder)
    write_figures(args.json, found)
    tell({key: value for key, value in found.items() if key != "tests"}, None)


if __name__ == "__main__":
    main()
