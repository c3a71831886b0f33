"""Everything that needs a GPU, in parts that are never lost: `make gpu-suite`.

    python benchmarks/gpu_suite.py [--out gpu_results] [--copy-to DIR] [--minutes 8] [--try]
                                   [--only NAME ...] [--list]

Parts run in order of value, each in a process with its own limit. A part starts only if its limit
fits into what is left of `--minutes`. Its state, figures and output are written to

    OUT/DEVICE_COMMIT/PART.json, PART.figures.json, PART.log
    OUT/DEVICE_COMMIT/summary.json      the figures of all parts, and ratios between them

and copied to DIR after every part. The same command goes on where the last one stopped, however it
ended: finished parts are left out, an interrupted one runs again, and failed ones run once more
after all others. What a part measured before it failed or reached its limit counts. `--list` shows
how far it is. Nothing is downloaded: on a machine without a network, packages other than torch come
from `gpu_wheels/`, which `make gpu-bundle` fills. `--try` runs tiny sizes, also on a CPU.

Keys of the summary: those of the parts, and ratios at 8192 tokens per micro-batch, with `_2048` at
2048: `qlora_tokens_per_second`, `qlora_over_lora_tokens`, `qlora_over_peft_tokens`,
`qdora_over_peft_tokens`, `qdora_over_qlora_time`, `qlora_memory_over_peft`.
`short_over_long_tokens` is tokens/s at 2048 over those at 8192.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import write_figures

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / "gpu_wheels"
TESTS = ["tests/test_gpu.py", "tests/test_gpu_packing.py"]
TESTS += ["tests/training/test_throughput.py", "tests/training/test_profiler.py"]
TESTS += ["tests/modules/test_activations.py"]
ATTEMPTS = 2  # starts of a part
ON_CPUS = 5  # times the limits: a CPU compiles and computes more slowly
FINISHED = "finished"


@dataclass(frozen=True)
class Part:
    """A part of the suite.

    Fields:
        limit: seconds; then it is ended.
        command: arguments of Python; JSON stands for the file of its figures.
        tiny: arguments that `--try` adds.
        kind: "tests": passed and failed tests are read from the output.
    """

    name: str
    limit: int
    command: tuple[str, ...]
    tiny: tuple[str, ...] = ("--quick",)
    kind: str = ""

    def words(self, figures: Path, tiny: bool) -> list[str]:
        words = [*self.command, *(self.tiny if tiny else ())]
        return [sys.executable, *(str(figures) if word == "JSON" else word for word in words)]


def script(name: str, limit: int, file: str, *words: str) -> Part:
    return Part(name, limit, (f"benchmarks/{file}.py", *words, "--json", "JSON"))


def steps(name: str, limit: int, contestant: str, *words: str) -> Part:
    """Train steps; their keys begin with the part's name."""
    return script(name, limit, "gpu_train_step", contestant, *words, "--name", name)


def tests(name: str, limit: int, *options: str) -> Part:
    """GPU tests, with pytest-xdist eight at a time: 152 s of compiling on 16 cores."""
    has_xdist = find_spec("xdist") or any(WHEELS.glob("pytest_xdist-*"))
    at_once = ["-n", str(min(8, os.cpu_count() or 1))] if has_xdist else []
    words = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *at_once, *options]
    return Part(name, limit, ("-m", "pytest", *words, *TESTS), (), "tests")


FIRST_TESTS = "bits or equals or loss or trains_the_same or estimate"
FP8 = "quantization.compute=fp8"
GRAPHS = "cuda_graphs=true"
OF_70B = ("--model", "llama3_70b_8_layers", "activation.checkpointing=full")

# Most valuable first. On an H200 the 8B steps at both sizes took 50 (QLoRA), 70 (QDoRA), 47 (LoRA)
# and 62 s (PEFT); dequantize, linear and bandwidth 20, 37 and 13 s. Limits are twice that.
PARTS = (
    script("norms", 90, "gpu_norms"),
    tests("tests_first", 60, "-k", FIRST_TESTS),
    script("dequantize", 60, "dequantize"),
    script("scaled_mm", 60, "gpu_scaled_mm"),
    steps("ours_qlora", 110, "ours_qlora", "--kernels"),
    steps("ours_qdora", 140, "ours_qdora", "--kernels"),
    steps("ours_lora", 110, "ours_lora"),
    steps("peft_qlora", 140, "peft_qlora"),
    steps("ours_qlora_graphs", 110, "ours_qlora", GRAPHS),
    steps("ours_qdora_graphs", 140, "ours_qdora", GRAPHS),
    steps("ours_fp8_qlora", 140, "ours_qlora", FP8, "--kernels"),
    steps("qwen3_8b_qlora", 110, "ours_qlora", "--model", "qwen3_8b", "--tokens", "4096"),
    steps("qwen3_8b_fp8_qlora", 110, "ours_qlora", FP8, "--model", "qwen3_8b", "--tokens", "4096"),
    steps("qwen3_8b_qdora", 110, "ours_qdora", "--model", "qwen3_8b", "--tokens", "4096"),
    steps("ours_qlora_rank_64", 110, "ours_qlora", "adapter.rank=64"),
    steps("ours_qdora_rank_64", 140, "ours_qdora", "adapter.rank=64"),
    steps("memory_70b_8_layers", 150, "ours_qdora", "--estimate", "--tokens", "2048", *OF_70B),
    steps("memory_8b", 150, "ours_qlora", "--estimate"),
    steps("fsdp_world_1", 140, "ours_qdora", "--fsdp"),
    steps("fsdp_norm_graphs", 140, "ours_qdora", "--fsdp", GRAPHS),
    script("offload", 240, "gpu_offload"),
    steps("packed_rows", 140, "ours_qdora", "--packed"),
    steps("peft_qdora", 200, "peft_qdora"),
    steps("qwen3_8b_peft_qlora", 140, "peft_qlora", "--model", "qwen3_8b", "--tokens", "4096"),
    *(steps(f"losses_seed_{n}", 150, "ours_qlora", "--losses", "200", "--seed", str(n))
      for n in range(3)),
    steps("losses_fp8", 150, "ours_qlora", FP8, "--losses", "200"),
    script("linear", 80, "linear"),
    script("bandwidth", 40, "bandwidth"),
    tests("tests_all", 400),
)  # fmt: skip

TIMES = {  # key: seconds of the first over those of the second
    "qdora_over_qlora_time": ("ours_qdora", "ours_qlora"),
    "qdora_over_qlora_time_rank_64": ("ours_qdora_rank_64", "ours_qlora_rank_64"),
    "qlora_over_lora_tokens": ("ours_lora", "ours_qlora"),
    "qlora_over_peft_tokens": ("peft_qlora", "ours_qlora"),
    "qdora_over_peft_tokens": ("peft_qdora", "ours_qdora"),
    "qdora_over_qlora_time_graphs": ("ours_qdora_graphs", "ours_qlora_graphs"),
    "graphs_over_qlora_tokens": ("ours_qlora", "ours_qlora_graphs"),
    "fp8_over_qlora_tokens": ("ours_qlora", "ours_fp8_qlora"),
}


def compare(found: dict[str, float]) -> dict[str, float]:
    """Ratios between contestants."""
    ratios = {}
    for tokens, suffix in ((8192, ""), (2048, "_2048")):
        for key, pair in TIMES.items():
            over, under = (found.get(f"{name}_{tokens}_seconds") for name in pair)
            if over and under:
                ratios[key + suffix] = over / under
        pair = ("ours_qlora", "peft_qlora")
        over, under = (found.get(f"{name}_{tokens}_peak_bytes") for name in pair)
        if over and under:
            ratios["qlora_memory_over_peft" + suffix] = over / under
        if rate := found.get(f"ours_qlora_{tokens}_tokens_per_second"):
            ratios["qlora_tokens_per_second" + suffix] = rate
    short, long = (found.get(f"ours_qlora_{n}_tokens_per_second") for n in (2048, 8192))
    if short and long:
        ratios["short_over_long_tokens"] = short / long
    return ratios


# ---- what is known of each part ----------------------------------------------------------------


def version() -> str:
    """The commit; where there is no repository, a digest of the code."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    files = sorted(f for d in ("qfsdp", "recipes") for f in (ROOT / d).rglob("*.py"))
    return "code-" + hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class Results:
    """The folder of one device and commit; every file in it is whole at any time."""

    def __init__(self, out: Path, tiny: bool) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", device_name().lower())
        self.folder = out / f"{slug}_{version()}{'_tiny' if tiny else ''}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: Part, ending: str) -> Path:
        return self.folder / f"{part.name}.{ending}"

    def state(self, part: Part) -> dict[str, Any]:
        file = self.path(part, "json")
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def write(self, part: Part, state: dict[str, Any]) -> None:
        write_figures(self.path(part, "json"), state)

    def figures(self, parts: tuple[Part, ...]) -> dict[str, float]:
        """The figures of all parts, of unfinished ones too, and the ratios."""
        found: dict[str, float] = {}
        for part in parts:
            found |= self.state(part).get("figures", {})
            if (file := self.path(part, "figures.json")).exists():
                found |= json.loads(file.read_text())
        return compare(found) | found

    def summarize(self, parts: tuple[Part, ...], copy_to: Path | None) -> None:
        about = {"device": device_name(), "commit": version(), "torch": torch.__version__}
        about |= {"python": sys.version.split()[0], "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        states = {part.name: self.state(part).get("state", "not run") for part in parts}
        content: Any = {"about": about, "parts": states, "figures": self.figures(parts)}
        write_figures(self.folder / "summary.json", content)
        if copy_to is not None:
            shutil.copytree(self.folder, copy_to / self.folder.name, dirs_exist_ok=True)

    def next_part(self, parts: tuple[Part, ...], seconds: float) -> Part | None:
        """The first part that is not finished and whose limit is at most `seconds`. Those that
        failed come after all others."""
        states = {part: self.state(part) for part in parts}
        open_parts = [
            part
            for part, state in states.items()
            if state.get("state") != FINISHED and state.get("attempts", 0) < ATTEMPTS
        ]
        failed = [part for part in open_parts if states[part].get("state") not in (None, "running")]
        ordered = [part for part in open_parts if part not in failed] + failed
        return next((part for part in ordered if part.limit <= seconds), None)


# ---- running -----------------------------------------------------------------------------------


def environment(scratch: Path) -> dict[str, str]:
    """Environment variables that add the wheels of `gpu_wheels/` that are not installed."""
    paths = [str(ROOT)]
    if WHEELS.is_dir():
        site = scratch / "site"
        names = sorted(WHEELS.glob("*.whl"))
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        missing = [wheel for wheel in names if not importable(wheel)]
        if missing:
            command = [sys.executable, "-m", "pip", "install", *options, *map(str, missing)]
            subprocess.run(command, check=True)
            paths.append(str(site))
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    added = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if not torch.cuda.is_available():
        added["QFSDP_EMULATE_FP8"] = "1"
    return os.environ | added


def importable(wheel: Path) -> bool:
    try:
        distribution(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        return False
    return True


def die_with_parent() -> None:
    """In the process of a part, before it starts: it ends if the suite is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run(part: Part, results: Results, env: dict[str, str], tiny: bool) -> None:
    """Runs a part to its end or limit. Before it starts, its state says that it runs."""
    state = results.state(part)
    words = part.words(results.path(part, "figures.json"), tiny)
    state |= {"state": "running", "attempts": state.get("attempts", 0) + 1}
    state |= {"command": " ".join(words[1:]), "started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
    results.write(part, state)
    print(f"== {part.name}: at most {part.limit} s", flush=True)
    log, since = results.path(part, "log"), time.monotonic()
    with log.open("a") as file:
        print(f"== attempt {state['attempts']}: {state['command']}", file=file, flush=True)
        begins = file.tell()
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            status: int | None = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    output = log.read_bytes()[begins:].decode(errors="replace")
    seconds = time.monotonic() - since
    state["state"] = FINISHED if status == 0 else "failed" if status is not None else "limit"
    state |= {"exit": status, "seconds": round(seconds, 1)}
    if part.kind == "tests":
        state["figures"] = counted_tests(part.name, output)
        if status == 1:  # tests failed, and all have run
            state["state"] = FINISHED
    results.write(part, state)
    print(output[-1500:] if status == 0 else output[-5000:])
    print(f"{part.name}: {state['state']}, exit {status}, {seconds:.0f} s\n", flush=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what the part has left running: it is the leader of its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def counted_tests(name: str, output: str) -> dict[str, float]:
    found = {word: re.findall(rf"(\d+) {word}", output) for word in ("passed", "failed", "skipped")}
    return {f"{name}_{word}": int(n[-1]) if n else 0 for word, n in found.items()}


def tell(results: Results, parts: tuple[Part, ...]) -> None:
    for part in parts:
        state = results.state(part)
        spent = f"{state['seconds']} s" if "seconds" in state else ""
        print(
            f"{part.name:24} {part.limit:4} s at most   {state.get('state', 'not run'):9} {spent}"
        )
    print(f"results: {results.folder}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_results")
    parser.add_argument("--copy-to", type=Path, help="a second folder, for example a mounted one")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this call")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts")
    parser.add_argument("--list", action="store_true", help="print what is done, run nothing")
    parser.add_argument("--try", dest="tiny", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    known = [part.name for part in PARTS]
    if unknown := [name for name in args.only or () if name not in known]:
        raise SystemExit(f"error: --only: {unknown[0]}; expected some of {', '.join(known)}")
    if not (torch.cuda.is_available() or args.tiny or args.list):
        raise SystemExit("error: no GPU here; `--try` runs tiny sizes on a CPU")
    end = time.monotonic() + 60 * args.minutes
    results = Results(args.out, args.tiny)
    parts = tuple(part for part in PARTS if not args.only or part.name in args.only)
    if not torch.cuda.is_available():
        parts = tuple(replace(part, limit=ON_CPUS * part.limit) for part in parts)
    print(f"{device_name()}, torch {torch.__version__}, {version()}: {results.folder}", flush=True)
    if not args.list:
        with tempfile.TemporaryDirectory() as scratch:
            env = environment(Path(scratch))
            while part := results.next_part(parts, end - time.monotonic()):
                run(part, results, env, args.tiny)
                results.summarize(PARTS, args.copy_to)
    tell(results, parts)
    left = [part.name for part in parts if results.state(part).get("state") != FINISHED]
    if left and not args.list:
        print(f"not finished: {', '.join(left)}; the same command goes on")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
