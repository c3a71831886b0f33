"""Downloads the wheels that `make gpu-suite` needs on a machine without a network.

    python benchmarks/gpu_bundle.py [--python 3.12] [--all]

The wheels, for Linux on x86-64, go to `gpu_wheels/`. Copy the checkout with that folder to the
machine; together they are less than 64 MiB. bitsandbytes' wheel is packed again with one of its
libraries: that for CUDA 13.0. `--all` adds transformers and its dependencies, for PEFT, and
flash-linear-attention.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

WHEELS = Path(__file__).parent.parent / "gpu_wheels"
LIMIT_BYTES = 48 << 20  # the checkout takes up to 16 MiB more
LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(?!cuda130\.so)\w+\.so")  # not needed
NEEDED = ["safetensors", "omegaconf", "pyyaml", "tqdm", "pytest", "pluggy", "iniconfig"]
NEEDED += ["packaging", "pygments", "bitsandbytes", "peft"]
PEERS = ["transformers", "accelerate", "tokenizers"]
PEERS += ["flash-linear-attention", "fla-core", "einops"]  # pure Python: kernels in Triton
NO_WHEEL = ["antlr4-python3-runtime==4.9.3"]  # needed by omegaconf; pure Python, built here
PLATFORMS = ["manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014"]


def with_one_library(wheel: Path) -> None:
    """Packs a wheel of bitsandbytes again, without the libraries of other devices."""
    packed = wheel.with_suffix(".part")
    with ZipFile(wheel) as old, ZipFile(packed, "w", ZIP_DEFLATED) as new:
        kept = [entry for entry in old.infolist() if not LIBRARY.fullmatch(entry.filename)]
        if not any(entry.filename.endswith("cuda130.so") for entry in kept):
            raise SystemExit(f"error: {wheel.name}: no library for CUDA 13.0")
        for entry in kept:
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                lines = [line for line in lines if not LIBRARY.fullmatch(line.split(",")[0])]
                content = "".join(lines).encode()
            new.writestr(entry, content, ZIP_DEFLATED)
    packed.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--python", default="3.12", help="Python version of the machine with the GPU"
    )
    parser.add_argument("--all", action="store_true", help="add transformers and fla")
    args = parser.parse_args()
    shutil.rmtree(WHEELS, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", args.python, "--dest", str(WHEELS)]
    options += [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    names = NEEDED + (PEERS if args.all else [])
    subprocess.run([*pip, "download", *options, *names], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(WHEELS), *NO_WHEEL], check=True)
    for wheel in WHEELS.glob("bitsandbytes-*.whl"):
        with_one_library(wheel)
    size = sum(wheel.stat().st_size for wheel in WHEELS.iterdir())
    print(f"{WHEELS}: {len(list(WHEELS.iterdir()))} wheels, {size / 1e6:.1f} MB")
    if size > LIMIT_BYTES:
        raise SystemExit(f"error: {size / 1e6:.0f} MB; expected at most {LIMIT_BYTES / 1e6:.0f}")


if __name__ == "__main__":
    main()
