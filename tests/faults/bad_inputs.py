"""Runs every bad input of `bad_input_cases` through its recipe, and prints a table.

    python -m tests.faults.bad_inputs                 all of them, about 5 minutes on two cores
    python -m tests.faults.bad_inputs generate nan    those whose recipe or name has a word

A case is right if the command ends with status 2 and one line (some are told in two), without a
traceback. The exit status is 1 if any case is wrong. Seconds are listed, and those over ten are
marked; they count as wrong with --seconds only, because they depend on the machine.

This process imports the library once and forks a child for each case, as starting Python with torch
takes seconds. A child may use 8 GiB of memory and two minutes.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("QFSDP_EAGER_KERNELS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

LIMIT_S = 120
SLOW_S = 10.0
MEMORY = 8 << 30


@dataclass
class Case:
    """A command that a user should not have typed.

    Fields:
        recipe: the name that the table groups by.
        name: what is wrong, in a few words.
        words: of the command line, after `qfsdp`; `make` may add to them.
        make: writes the files that are wrong into an empty folder and returns words.
        lines: the most lines that standard error may have.
    """

    recipe: str
    name: str
    words: Sequence[str]
    make: Callable[[Path], Sequence[str]] | None = None
    lines: int = 1


@dataclass
class Outcome:
    """How a case ended.

    Fields:
        status: exit status; 128 + signal; None if it did not end within LIMIT_S.
        errors: the lines of standard error.
    """

    status: int | None
    errors: list[str]
    seconds: float

    def problem(self, case: Case, max_seconds: float | None) -> str:
        """What is wrong with this outcome, or an empty text."""
        if self.status is None:
            return "never ended"
        if any("Traceback (most recent call last)" in line for line in self.errors):
            return "traceback"
        if self.status != 2:
            return "accepted" if self.status == 0 else f"status {self.status}"
        if not 1 <= len(self.errors) <= case.lines:
            return f"{len(self.errors)} lines"
        if max_seconds is not None and self.seconds > max_seconds:
            return "slow"
        return ""


def run_case(case: Case, folder: Path) -> Outcome:
    """Runs a case in a forked child whose working directory is the empty `folder`."""
    words = [*case.words, *(case.make(folder) if case.make else [])]
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_command(words, folder, out, err)
    status = _wait(child, started + LIMIT_S)
    seconds = time.monotonic() - started
    lines = err.read_text(errors="replace").splitlines()
    # Lines that say what takes over five seconds on this machine are no errors.
    waits = re.compile(r" \.\.\.( [\d.]+ s)?$")
    errors = [line for line in lines if line.strip() and not waits.search(line)]
    return Outcome(status, errors, seconds)


def in_child(function: Callable[[], object]) -> None:
    """Runs a function in a forked child, so that this process starts no thread.

    A forked child of a process with threads may wait for them for ever.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if _wait(child, time.monotonic() + LIMIT_S) != 0:
        raise RuntimeError(f"{function} failed")


def _be_the_command(words: Sequence[str], folder: Path, out: Path, err: Path) -> None:
    """Becomes `qfsdp WORDS`; never returns."""
    status = 1
    try:
        os.setsid()  # a group to kill, with the ranks that it starts
        for number, file in ((1, out), (2, err)):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        from qfsdp.cli.command import run_command

        sys.argv = ["qfsdp", *words]
        run_command("qfsdp", words)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, until: float) -> int | None:
    """The exit status of a child; None, with its whole group killed, if it runs longer."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main(words: Sequence[str]) -> int:
    limit = SLOW_S if "--seconds" in words else None
    wanted = [word for word in words if not word.startswith("--")]
    import qfsdp.evaluation.lm_harness
    import qfsdp.launch.start
    import qfsdp.planning.preflight
    import qfsdp.planning.search
    import qfsdp.training.validation  # noqa: F401
    from tests.faults.bad_input_cases import all_cases
    from tests.faults.good_inputs import write_good_inputs

    wrong = 0
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as name:
        root = Path(name)
        good = write_good_inputs(root / "good")
        cases = [
            case
            for case in all_cases(good)
            if not wanted or any(word in f"{case.recipe}: {case.name}" for word in wanted)
        ]
        for number, case in enumerate(cases):
            folder = root / f"{number:03}"
            folder.mkdir()
            outcome = run_case(case, folder)
            problem = outcome.problem(case, limit)
            wrong += bool(problem)
            slow = " slow" if outcome.seconds > SLOW_S and problem != "slow" else ""
            first = outcome.errors[-1][:150] if outcome.errors else "-"
            print(
                f"{problem or 'ok':<12}{outcome.status!s:>5} {len(outcome.errors):>3} lines "
                f"{outcome.seconds:6.1f} s{slow}  {case.recipe}: {case.name}\n             {first}",
                flush=True,
            )
    print(f"{len(cases)} bad inputs: {len(cases) - wrong} right, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
