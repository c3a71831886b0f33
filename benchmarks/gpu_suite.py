"""Everything that needs a GPU, in parts that are never lost: `make gpu-suite`.

    python benchmarks/gpu_suite.py [--out gpu_results.zip] [--from ARCHIVE] [--minutes 9.5] [--dry]
                                   [--only NAME ...] [--list]

Parts (`gpu_parts.py`) run in order of value, each in a process with its own limit. A part starts
only if its limit fits into what is left of `--minutes`. All results are in one archive, which is
written while a part runs and when it ends. It has, for each card and version of the code,

    CARD_CODE/PART.json     state, seconds and figures of a part
    CARD_CODE/PART.log      what it printed
    CARD_CODE/summary.json  all figures, and ratios between parts

The same command goes on where the last one stopped, however it ended; on another machine hand the
archive over with `--from`. Finished parts are left out, an interrupted one runs again, and failed
ones run once more after all others. What a part measured before it failed or was stopped counts.
After each part the table of aims is printed, as far as it is known; `--list` prints all of it.

Neither a network nor git is needed: packages that a machine has not come from `gpu_wheels/`, which
`make gpu-bundle` fills. `--dry` runs the code of all parts with tiny sizes on a CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_archive import FINISHED, Archive, Results, code_version  # noqa: E402
from benchmarks.gpu_parts import PARTS, Part, aims, compare  # noqa: E402

WHEELS = ROOT / "gpu_wheels"
SAVED_EVERY = 5.0  # seconds
ON_CPUS = 20  # times the limits: a dry run may share two cores with others
# Parts are forked from a server that has imported these: 5 to 15 s less for each. They ask for no
# GPU when they are imported, as a process that has cannot be forked; peers do.
PRELOADED = ["benchmarks.gpu_train_step", "benchmarks.dequantize", "pytest", "omegaconf"]
PRELOADED += ["qfsdp.training.validation", "qfsdp.training.profiler", "qfsdp.planning.preflight"]
NEEDED = ["torch", "omegaconf", "safetensors", "pytest"]
PEERS = ["transformers", "peft", "bitsandbytes"]


# ---- processes ---------------------------------------------------------------------------------


def prepare(scratch: Path, dry: bool) -> None:
    """Sets what the processes of parts inherit; adds wheels that are not installed."""
    paths = [str(ROOT)]
    missing = [wheel for wheel in sorted(WHEELS.glob("*.whl")) if not is_installed(wheel)]
    if missing:
        site = str(scratch / "site")
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site]
        command = [sys.executable, "-m", "pip", "install", *options, *map(str, missing)]
        subprocess.run(command)  # what is missing all the same is named below
        paths.append(site)
    sys.path[:0] = paths
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise SystemExit(
            f"error: {sys.executable} lacks {', '.join(lacking)}; expected PYTHON=..., an "
            "interpreter with PyTorch for this GPU and `pip install -e .[dev]`"
        )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.getenv("PYTHONPATH")]))
    os.environ |= {"PYTHONUNBUFFERED": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if dry:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "QFSDP_EMULATE_FP8": "1"}
        os.environ |= {"OMP_NUM_THREADS": "1", "QFSDP_EAGER_KERNELS": "1"}


def is_installed(wheel: Path) -> bool:
    """Whether this Python has the package; of transformers, whether it is not an older one."""
    name, version = wheel.name.split("-")[:2]
    try:
        found = distribution(name).version
    except PackageNotFoundError:
        return False
    return name != "transformers" or release(found) >= release(version)


def release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def enter_part(words: list[str], log: str) -> None:
    """Runs a script in a new process, whose output goes to a file. It is the leader of its process
    group, and ends if the one that started it is killed (Linux)."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


def end_group(process: Any) -> None:
    """Ends a part and what it has left running."""
    if process.pid is None:  # it has not started
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def server(dry: bool, scratch: Path) -> tuple[Any, dict[str, Any]]:
    """What starts processes, and what the first of them says of the card. Forks of a server that
    has imported PyTorch; if these cannot use the card, new interpreters."""
    log, found = scratch / "card.log", scratch / "card.json"
    mp.set_forkserver_preload(PRELOADED + (PEERS if dry else []))
    for method in ("forkserver", "spawn"):
        context: Any = mp.get_context(method)
        words = ["benchmarks/gpu_archive.py", str(found), *(["--dry"] if dry else [])]
        process = context.Process(target=enter_part, args=(words, str(log)))
        process.start()
        process.join()
        if process.exitcode == 0:
            return context, json.loads(found.read_text())
    raise SystemExit(f"{log.read_text()}\nerror: no GPU to use here; `--dry` needs none")


class Suite:
    """Runs parts, and writes what they find."""

    def __init__(self, results: Results, context: Any, scratch: Path, dry: bool) -> None:
        self.results, self.context, self.scratch, self.dry = results, context, scratch, dry

    def run(self, part: Part) -> None:
        """Runs a part to its end or limit. Before it starts, its state says that it runs."""
        limit = part.limit * (ON_CPUS if self.dry else 1)
        figures, log = (self.scratch / f"{part.name}.{end}" for end in ("json", "log"))
        state = self.results.state(part.name)
        if "figures" in state:  # tests go on from there
            figures.write_text(json.dumps(state["figures"]))
        words = part.words(figures, self.dry)
        self.results.start(part.name, words)
        print(f"== {part.name}: at most {limit} s", flush=True)
        since = time.monotonic()
        process = self.context.Process(target=enter_part, args=(words, str(log)))
        try:
            process.start()
            while (left := since + limit - time.monotonic()) > 0 and process.is_alive():
                process.join(min(SAVED_EVERY, left))
                self.results.keep(part.name, figures, log)
            status = process.exitcode  # None: at its limit
        finally:
            end_group(process)
            self.results.keep(part.name, figures, log)
        seconds = round(time.monotonic() - since, 1)
        state = self.results.end(part.name, status, seconds)
        self.results.summarize(compare)
        shown = log.read_text(errors="replace") if log.exists() else ""
        print(shown[-600:] if status == 0 else shown[-3000:])
        print(f"{part.name}: {state['state']}, exit {status}, {seconds:.0f} s", flush=True)

    def run_all(self, parts: tuple[Part, ...], end: float) -> None:
        factor = 0 if self.dry else 1
        while name := self.results.next(
            {part.name: factor * part.limit for part in parts}, end - time.monotonic()
        ):
            self.run(next(part for part in parts if part.name == name))
            print_aims(self.results, measured_only=True)


# ---- what is known -----------------------------------------------------------------------------


def print_aims(results: Results, measured_only: bool) -> None:
    print(f"aims on {results.folder}")
    for key, aim, value, met in aims(results.figures(compare)):
        if value or not measured_only:
            print(f"  {key:46} {aim:8} {value:>12}  {met}")
    print(flush=True)


def tell(results: Results) -> None:
    for part in PARTS:
        state = results.state(part.name)
        spent = f"{state['seconds']} s" if "seconds" in state else ""
        print(
            f"{part.name:26} {part.limit:4} s at most   {state.get('state', 'not run'):9} {spent}"
        )
    print_aims(results, measured_only=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_results.zip", metavar="ARCHIVE")
    parser.add_argument("--from", dest="start", type=Path, metavar="ARCHIVE", help="default: OUT")
    parser.add_argument("--minutes", type=float, default=9.5, help="of this call")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="parts")
    parser.add_argument("--list", action="store_true", help="print what is done, run nothing")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    args = parser.parse_args()
    known = [part.name for part in PARTS]
    if unknown := [name for name in args.only or () if name not in known]:
        parser.error(f"--only: {unknown[0]}; expected some of {', '.join(known)}")
    if args.start is not None and not args.start.is_file():
        parser.error(f"--from: {args.start} is no file; expected an archive of this suite")
    return args


def main() -> None:
    args = arguments()
    end = time.monotonic() + 60 * args.minutes
    archive = Archive(args.out, args.start or args.out)
    if args.list:
        for folder in archive.folders():
            tell(Results(archive, folder))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on"))
    parts = tuple(part for part in PARTS if not args.only or part.name in args.only)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare(scratch, args.dry)
        context, about = server(args.dry, scratch)
        results = Results(archive, f"{about['slug']}_{code_version()}", about)
        print(f"{about}\n{args.out}: {results.folder}", flush=True)
        Suite(results, context, scratch, args.dry).run_all(parts, end)
    tell(results)
    states = {part.name: results.state(part.name).get("state") for part in parts}
    if left := [name for name, state in states.items() if state != FINISHED]:
        print(f"not finished: {', '.join(left)}; the same command goes on")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
