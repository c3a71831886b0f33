"""Interpreters that can import the packages to compare with.

`python_for(PEFT)` returns an interpreter with everything that the peer needs, or None and a printed
line. It is the running interpreter if that has everything. Otherwise it is a virtual environment
below `examples.demo.cache_dir()`, made once. The environment sees the packages of the running
interpreter through a folder of links, except those in `hidden`. So torch is the same, nothing is
copied, and pip adds only the missing packages.
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
        name: of the folder, and in messages.
        requirements: in pip's syntax; a version only as `==`.
        hidden: packages of the running interpreter that the peer must not see.
    """

    name: str
    requirements: tuple[str, ...]
    hidden: tuple[str, ...] = ()


PEFT = Peer("peft", ("peft", "bitsandbytes", "transformers", "accelerate"))
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
    """An interpreter for `peer`, made at the first call; None and a printed line on failure."""
    running = Path(sys.executable)
    if not peer.hidden and not missing(running, peer):
        return running
    # One folder per environment, because the links point into it.
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
    """Fills `folder` with links to the packages of the running interpreter, except `hidden`.

    The folder is outside the virtual environment: pip does not touch packages there. A linked
    package inside it would be emptied when pip replaces it.
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
