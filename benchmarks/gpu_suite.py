"""Runs everything that needs a GPU: `make gpu-suite`. Under 8 minutes on one H200.

    python benchmarks/gpu_suite.py [--json gpu_suite.json] [--minutes 8] [--try]

Parts: the GPU tests, the small benchmarks on the device, and train steps of a model with
Llama-3-8B's shapes, ours and PEFT's. Each part is a process. Nothing is downloaded. A part that
cannot run is reported and the rest goes on; with 80 GB of GPU memory this may happen to PEFT at
8192 tokens, which allocates 76 GB. The output of all parts, with tables of kernels, goes to
`gpu_suite.log` next to the JSON file. On a machine without a network, packages other than torch
come from `gpu_wheels/`, which `make gpu-bundle` fills. `--try` runs tiny sizes (2048 tokens), also
on a CPU. Not included: `gpu_train_step.py peft_qdora` and `offload_tiers.py`.

Keys: those of the parts, and `tests_passed`, `tests_failed`, `minutes`. At 8192 tokens per
micro-batch, and with the suffix `_2048` at 2048: `qlora_tokens_per_second`,
`qlora_over_lora_tokens`, `qlora_over_peft_tokens`, `qdora_over_qlora_time`,
`qlora_memory_over_peft`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / "gpu_wheels"
STEPS = (
    "ours_qlora",
    "ours_qdora",
    "ours_lora",
    "peft_qlora",
)  # they took 50, 70, 47, 62 s on an H200
BENCHMARKS = ("dequantize", "linear", "bandwidth")  # they took 20, 37, 13 s
TESTS = ["tests/test_gpu.py", "tests/test_gpu_packing.py"]
TESTS += [
    "tests/training/test_throughput.py",
    "tests/training/test_profiler.py",
    "tests/modules/test_activations.py",
]
TIMES = {  # key: seconds of the first over those of the second
    "qdora_over_qlora_time": ("ours_qdora", "ours_qlora"),
    "qlora_over_lora_tokens": ("ours_lora", "ours_qlora"),
    "qlora_over_peft_tokens": ("peft_qlora", "ours_qlora"),
}


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
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def importable(wheel: Path) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        return False
    return True


class Suite:
    """Runs one part after the other until the time is over."""

    def __init__(self, minutes: float, env: dict[str, str], scratch: Path, log: Path) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.env, self.scratch, self.log = env, scratch, log
        self.log.write_text("")
        self.figures: dict[str, float] = {}

    def run(self, name: str, *command: str) -> str:
        """Runs `python COMMAND` and returns its output; adds the figures that it writes."""
        print(f"\n== {name}", flush=True)
        left, since = self.end - time.monotonic(), time.monotonic()
        if left < 10:
            print(f"{name}: skipped, the time is over")
            return ""
        file = self.scratch / f"{name}.json"
        words = [sys.executable, *(word.replace("JSON", str(file)) for word in command)]
        try:
            done = subprocess.run(
                words, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=left
            )
            output, status = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            printed = (error.stdout or b"") + (error.stderr or b"")  # bytes, despite `text=True`
            output, status = printed.decode(errors="replace") + "\nthe time was over", -1
        with self.log.open("a") as log:
            log.write(f"\n== {name}: exit {status}\n{output}")
        print(output[-3000:] if status == 0 else output[-6000:])
        print(f"{name}: exit {status}, {time.monotonic() - since:.0f} s", flush=True)
        self.figures[f"{name}_exit_status"] = status
        if file.exists():
            self.figures |= json.loads(file.read_text())
        return output

    def tests(self) -> None:
        """Runs the GPU tests, with pytest-xdist eight at a time: 152 s of compiling on 16 cores."""
        has_xdist = find_spec("xdist") or any(WHEELS.glob("pytest_xdist-*"))
        at_once = ["-n", str(min(8, os.cpu_count() or 1))] if has_xdist else []
        options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *at_once]
        output = self.run("tests", "-m", "pytest", *options, *TESTS)
        for word in ("passed", "failed", "skipped"):
            found = re.findall(rf"(\d+) {word}", output)
            self.figures[f"tests_{word}"] = int(found[-1]) if found else 0


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
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("gpu_suite.json"))
    parser.add_argument("--minutes", type=float, default=8.0, help="no part starts later")
    parser.add_argument("--try", dest="tiny", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        raise SystemExit("error: no GPU here; `--try` runs tiny sizes on a CPU")
    started = time.monotonic()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        log = args.json.with_suffix(".log")
        suite = Suite(args.minutes, environment(Path(folder)), Path(folder), log)
        small = ["--quick"] if args.tiny else []
        for contestant in STEPS:  # first, because they matter most if time runs out
            script = "benchmarks/gpu_train_step.py"
            suite.run(contestant, script, contestant, "--kernels", "--json", "JSON", *small)
        for benchmark in BENCHMARKS:
            quick = [] if torch.cuda.is_available() else ["--quick"]
            suite.run(benchmark, f"benchmarks/{benchmark}.py", "--json", "JSON", *quick)
        suite.tests()
        found = compare(suite.figures) | suite.figures
    found["minutes"] = (time.monotonic() - started) / 60
    print(f"\n== {name}, torch {torch.__version__}")
    for key, value in found.items():
        print(f"{key:48} {value:.5g}")
    args.json.write_text(json.dumps(found, indent=2) + "\n")
    if found["tests_failed"] or not found["tests_passed"] and torch.cuda.is_available():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
