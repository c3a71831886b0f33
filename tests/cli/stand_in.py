"""A recipe that needs no model, its config, and how the tests of the command run it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

RECIPE = '''
"""A stand-in: prints what it would train, or fails on request."""
from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import torch

from qfsdp.config.component import Component
from qfsdp.common.errors import UserError
from qfsdp.launch.start import launch


@dataclass
class Model:
    path: str


@dataclass
class Config:
    model: Model
    fail: str = ""
    devices: int = 1
    optimizer: Component = field(default_factory=lambda: Component("torch.optim.SGD"))


def check(config: Config) -> None:
    print("PLACE preflight")
    if config.fail == "check":
        raise UserError("model.path: no such directory")
    torch.accelerator.device_count = lambda: config.devices


def main(config: Config) -> None:
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if config.fail == "user" or config.fail == f"user on {rank}":
        raise UserError("the data is odd")
    if config.fail == f"crash on {rank}":
        raise ValueError("a bug")
    if " on " in config.fail:
        print("PLACE waits", flush=True)
        time.sleep(600)
    os.write(1, f"PLACE rank {rank} of {size}: {config.model.path}\\n".encode())


if __name__ == "__main__":
    launch(__file__, Config, check, main)
'''

CONFIG = "# tune run recipes/stand_in --config configs/stand_in.yaml\nmodel:\n  path: llama\n"
STEP = ["--config", "configs/stand_in.yaml"]


def write_stand_in(root: Path, place: str) -> None:
    """Writes the recipe and its config below `root`; the recipe prints `place`."""
    for folder, name, text in [
        ("recipes", "stand_in.py", RECIPE),
        ("configs", "stand_in.yaml", CONFIG),
    ]:
        (root / folder).mkdir(exist_ok=True)
        (root / folder / name).write_text(text.replace("PLACE", place))


@dataclass
class Result:
    status: int
    out: list[str]
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(*words: str, cwd: Path, **env: str) -> Result:
    """Runs a command to its end. Of the output, the recipe's own lines if there are any, sorted."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    clean.pop("PYTHONPATH", None)
    done = subprocess.run(
        words, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=LIMIT_S
    )
    ours = sorted(line for line in done.stdout.splitlines() if " rank " in line or "flight" in line)
    return Result(done.returncode, ours or done.stdout.splitlines(), done.stderr)
