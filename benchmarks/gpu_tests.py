"""Tests that need a GPU, written down one by one: `make test-gpu`.

    python benchmarks/gpu_tests.py [--first-seconds 100] [--json tests.json] [--name tests]
                                   [--share N/ALL] [--on-cpu] [PYTEST'S WORDS ...]
    python benchmarks/gpu_tests.py --rates-from gpu_results.zip

The files of tests are those that have the mark `gpu`. `--first-seconds` takes the most telling ones
that fit into so many seconds: 15 that compare bits, then those of graphs and of waiting hosts,
which may leave a device unusable. What a test takes is in `gpu_test_seconds.json`, which
`--rates-from` writes from the archive of a suite. A test without a figure takes as long as others
of its function, or else as the mean of the last run. `--on-cpu` tries the tests themselves.

Keys: `NAME_passed`, `NAME_failed`, `NAME_skipped`, and `tests`: outcome and seconds of each. They
are written after every test. If the file is there, tests that passed are left out, and one that was
running when the process ended comes last. The exit status is that of pytest; with `--json` it is 0
if all tests have run: those that failed are figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from benchmarks.timing import write_figures  # noqa: E402

RATES = Path(__file__).parent / "gpu_test_seconds.json"
OUTCOMES = ("passed", "failed", "skipped")
OF_GRAPHS, OF_BITS, BIT_TESTS = "tests/test_gpu_steps.py::", "bits", 15


def function_of(test: str) -> str:
    return test.partition("[")[0]


class Rates:
    """Seconds of tests, as the last run on a GPU took them."""

    def __init__(self, file: Path = RATES) -> None:
        content = json.loads(file.read_text())
        self.mean: float = content["mean"]
        self.tests: dict[str, float] = content["tests"]

    def __getitem__(self, test: str) -> float:
        if test in self.tests:
            return self.tests[test]
        function = function_of(test)
        alike = [s for name, s in self.tests.items() if function_of(name) == function]
        return statistics.mean(alike) if alike else self.mean


def first_tests(tests: list[str], rates: Rates, seconds: float) -> list[str]:
    """The tests of graphs, and `BIT_TESTS` that compare bits: of every function in turn, the
    quickest first. At most `seconds` of them; those of graphs count first and run last."""
    of_function: dict[str, list[str]] = {}
    for test in sorted((t for t in tests if OF_BITS in function_of(t)), key=rates.__getitem__):
        of_function.setdefault(function_of(test), []).append(test)
    in_turn = sorted((at, t) for of_one in of_function.values() for at, t in enumerate(of_one))
    bits = [test for _, test in in_turn[:BIT_TESTS]]
    chosen, spent = [], 0.0
    for test in [t for t in tests if t.startswith(OF_GRAPHS)] + bits:
        if spent + rates[test] <= seconds:
            chosen.append(test)
            spent += rates[test]
    return sorted(chosen, key=lambda test: test.startswith(OF_GRAPHS))


class Recorder:
    """A plugin of pytest that chooses tests and writes each outcome to a file."""

    def __init__(
        self, name: str, file: Path | None, first_seconds: float | None, share: tuple[int, int]
    ) -> None:
        self.name, self.file, self.first_seconds, self.share = name, file, first_seconds, share
        known = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.outcomes: dict[str, tuple[str, float]] = known.get("tests", {})

    def counts(self) -> dict[str, Any]:
        kinds = [outcome for outcome, _ in self.outcomes.values()]
        return {f"{self.name}_{kind}": kinds.count(kind) for kind in OUTCOMES}

    def note(self, test: str, outcome: str, seconds: float) -> None:
        self.outcomes[test] = (outcome, seconds)
        write_figures(self.file, self.counts() | {"tests": self.outcomes})

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_name = {item.nodeid: item for item in items if item.get_closest_marker("gpu")}
        chosen = list(by_name)
        if self.first_seconds is not None:
            rates = Rates()
            chosen = first_tests(chosen, rates, self.first_seconds)
            print(f"{len(chosen)} tests, {sum(rates[test] for test in chosen):.0f} s")
        at, shares = self.share
        chosen = chosen[at::shares]
        before = {test: self.outcomes.get(test, ("", 0.0))[0] for test in chosen}
        chosen = [test for test in chosen if before[test] != "passed"]
        items[:] = [by_name[t] for t in sorted(chosen, key=lambda t: before[t] == "running")]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(nodeid, "running", 0.0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome, seconds = self.outcomes[report.nodeid]
        if report.when == "call" or report.outcome != "passed":  # setup and teardown may fail too
            outcome = report.outcome
        if report.failed:  # now: the process may not live to its end
            print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
        self.note(report.nodeid, outcome, round(seconds + report.duration, 3))


def write_rates(archive: Path) -> None:
    """Writes `gpu_test_seconds.json` from the figures of an archive."""
    found: dict[str, float] = {}
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            if name.endswith(".json"):
                tests = json.loads(file.read(name)).get("figures", {}).get("tests", {})
                found |= {test: s for test, (kind, s) in tests.items() if kind in OUTCOMES[:2]}
    if not found:
        raise SystemExit(f"error: {archive}: no tests have run; expected an archive of gpu_suite")
    mean = round(statistics.mean(found.values()), 3)
    content: Any = {"source": archive.name, "mean": mean, "tests": dict(sorted(found.items()))}
    write_figures(RATES, content)
    print(f"{RATES}: {len(found)} tests, {mean} s each")


def marked_files() -> list[str]:
    """Files of tests with the mark `gpu`."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    return [file for file, text in texts.items() if "mark.gpu" in text or "needs_gpu" in text]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--first-seconds", type=float)
    parser.add_argument("--share", default="0/1", metavar="N/ALL", help="of the tests, from 0")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--name", default="tests")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rates-from", type=Path, metavar="ARCHIVE")
    args, words = parser.parse_known_args()
    if args.rates_from is not None:
        return write_rates(args.rates_from)
    if args.on_cpu:
        os.environ["QFSDP_GPU_TESTS_ON"] = "cpu"
    at, shares = map(int, args.share.split("/"))
    recorder = Recorder(args.name, args.json, args.first_seconds, (at, shares))
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "-rf"]
    status = pytest.main([*options, *words, *marked_files()], plugins=[recorder])
    print(recorder.counts())
    through = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    sys.exit(0 if args.json is not None and status in through else int(status))


if __name__ == "__main__":
    main()
