"""Interpreters in which the packages that benchmarks compare with can be imported.

`python_for(PEFT)` is an interpreter with everything that the peer needs, or None and a printed
line. Where the running one has it all, it is that one. Else it is a virtual environment below
`examples.demo.cache_dir()`, made once: it sees the packages of the running interpreter through a
folder of links, without those that the peer cannot bear, so torch is the same and nothing is
copied; pip adds only what is missing.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.demo import cache_dir


@dataclass(frozen=True)
class Peer:
    """A set of packages to compare with.

    Fields:
        name: of its folder, and in messages.
        requirements: as pip takes them; a version, if any, as `==`.
        hidden: packages that must not be importable beside them.
    """

    name: str
    requirements: tuple[str, ...]
    hidden: tuple[str, ...] = ()


# PEFT refuses to add adapters while a torchao older than 0.16 can be imported.
PEFT = Peer("peft", ("peft", "bitsandbytes", "transformers", "accelerate"), ("torchao",))
BITSANDBYTES = Peer("bitsandbytes", ("bitsandbytes",))
TORCHAO = Peer("torchao", ("torchao==0.15.*",))
TORCHTUNE = Peer("torchtune", ("torchtune==0.6.1", "torchao==0.15.*"))

MISSING = """
import sys
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
for requirement in sys.argv[1:]:
    name, _, wanted = requirement.partition("==")
    try:
        if not fnmatch(version(name).partition("+")[0], wanted or "*"):
            print(requirement)
    except PackageNotFoundError:
        print(requirement)
"""


def python_for(peer: Peer) -> Path | None:
    """An interpreter for `peer`, made at the first call; None, and a line, if it cannot be."""
    running = Path(sys.executable)
    if not peer.hidden and not missing(running, peer):
        return running
    # One for each environment that the links may point into.
    digest = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    folder = cache_dir() / "peers" / f"{peer.name}-{digest}"
    python = folder / "venv/bin/python"
    if not python.exists():
        venv.create(folder / "venv", symlinks=True)
    link_packages(folder / "packages", peer.hidden)
    site = next((folder / "venv/lib").glob("python*/site-packages"))
    (site / "running.pth").write_text(f"{folder / 'packages'}\n")
    if lacking := missing(python, peer):
        print(f"{peer.name}: installing {', '.join(lacking)} in {folder}", flush=True)
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        install += ["--disable-pip-version-check", f"torch=={torch.__version__}"]
        done = subprocess.run(
            [*map(str, install), *peer.requirements], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            print(f"{peer.name}: skipped, {', '.join(lacking)} cannot be installed: {reason}")
            return None
    return python


def missing(python: Path, peer: Peer) -> list[str]:
    """The requirements of `peer` that `python` does not have."""
    command = [str(python), "-c", MISSING, *peer.requirements]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def link_packages(folder: Path, hidden: tuple[str, ...]) -> None:
    """Fills `folder` with links to what the running interpreter has installed, except `hidden`.

    Outside the environment: pip leaves alone what it finds there, where it would empty a
    linked package inside of it to replace it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        if not link.exists():  # upgraded or removed since
            link.unlink(missing_ok=True)
    for site in sys.path:
        if Path(site).name in ("site-packages", "dist-packages") and Path(site).is_dir():
            for entry in Path(site).iterdir():
                link = folder / entry.name
                if not entry.name.startswith(hidden) and not link.is_symlink():
                    link.symlink_to(entry)
