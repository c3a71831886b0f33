"""The archive of `benchmarks/gpu_suite.py`: one file with the results of all cards and versions.

python benchmarks/gpu_archive.py CARD.json [--dry]    writes what this process says of its card
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FINISHED, RUNNING = "finished", "running"
ATTEMPTS = 2  # of a part that fails or reaches its limit
INTERRUPTIONS = 5  # starts of a part that is ended from outside: it may be what ends the machine
LOG_BYTES = 200_000  # of a part

Compare = Callable[[dict[str, float]], dict[str, float]]


class Archive:
    """A zip file, which is whole at any time.

    Args:
        file: is written by `save`.
        start: is read, if it exists.
    """

    def __init__(self, file: Path, start: Path) -> None:
        self.file = file
        self.content: dict[str, bytes] = {}
        if start.exists():
            try:
                with zipfile.ZipFile(start) as archive:
                    self.content = {name: archive.read(name) for name in archive.namelist()}
            except zipfile.BadZipFile:
                raise SystemExit(f"error: {start}: no archive of this suite") from None

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(self.file.name + ".part")
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.content.items():
                archive.writestr(name, content)
        unfinished.replace(self.file)

    def folders(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.content})


class Results:
    """What the archive has of one card and one version of the code.

    Args:
        about: the card and the software.
    """

    def __init__(self, archive: Archive, folder: str, about: dict[str, Any] | None = None) -> None:
        self.archive, self.folder, self.about = archive, folder, about or {}

    def _read(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.archive.content.get(f"{self.folder}/{name}.json", b"{}")))

    def _write(self, name: str, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2) + "\n"
        self.archive.content[f"{self.folder}/{name}.json"] = text.encode()

    def state(self, part: str) -> dict[str, Any]:
        """State, attempts, command, seconds, exit status and figures; empty if it never ran."""
        return self._read(part)

    def start(self, part: str, words: list[str]) -> None:
        state = self.state(part)
        state |= {"state": RUNNING, "starts": state.get("starts", 0) + 1}
        state |= {"command": " ".join(words), "card": self.about.get("card")}
        state |= {"started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        self._write(part, state)
        self.archive.save()

    def keep(self, part: str, figures: Path, log: Path) -> None:
        """Takes the figures and the output of a running part, if they have changed."""
        before, state = dict(self.archive.content), self.state(part)
        if figures.exists():
            state["figures"] = state.get("figures", {}) | json.loads(figures.read_text())
            self._write(part, state)
        if log.exists():
            self.archive.content[f"{self.folder}/{part}.log"] = log.read_bytes()[-LOG_BYTES:]
        if self.archive.content != before:
            self.archive.save()

    def end(self, part: str, status: int | None, seconds: float) -> dict[str, Any]:
        """Writes how a part has ended: `status` None is at its limit."""
        state = self.state(part)
        state["state"] = FINISHED if status == 0 else "failed" if status is not None else "limit"
        state |= {"exit": status, "seconds": seconds, "attempts": state.get("attempts", 0) + 1}
        self._write(part, state)
        self.archive.save()
        return state

    def figures(self, compare: Compare) -> dict[str, float]:
        """The figures of all parts, of unfinished ones too, and the ratios. Not those of single
        tests."""
        found: dict[str, float] = {}
        for name in self.archive.content:
            folder, _, file = name.partition("/")
            if folder == self.folder and file.endswith(".json") and file != "summary.json":
                found |= json.loads(self.archive.content[name]).get("figures", {})
        found = {key: value for key, value in found.items() if isinstance(value, int | float)}
        return compare(found) | found

    def summarize(self, compare: Compare) -> None:
        self._write("summary", {"about": self.about, "figures": self.figures(compare)})
        self.archive.save()

    def next(self, limits: dict[str, float], seconds: float) -> str | None:
        """The first part that is not finished and whose limit is at most `seconds`. Those that
        failed or were interrupted come after all others."""
        again, states = [], {part: self.state(part) for part in limits}
        for part, state in states.items():
            if not state and limits[part] <= seconds:
                return part
            tried = state.get("attempts", 0) >= ATTEMPTS
            ended = state.get("starts", 0) - state.get("attempts", 0) >= INTERRUPTIONS
            if state and state["state"] != FINISHED and not tried and not ended:
                again.append(part)
        # An interrupted one first: it has not failed yet.
        again.sort(key=lambda part: states[part]["state"] != RUNNING)
        return next((part for part in again if limits[part] <= seconds), None)


def code_version() -> str:
    """A digest of the code that is measured: a machine may have the files without git."""
    files = sorted(file for name in ("qfsdp", "recipes") for file in (ROOT / name).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def commit() -> str | None:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def about_this_process(dry: bool) -> dict[str, Any]:
    """Card and software. Raises RuntimeError if the card cannot be used."""
    import torch

    about: dict[str, Any] = {"card": "cpu", "slug": "dry" if dry else "cpu", "commit": commit()}
    about |= {"torch": torch.__version__, "python": sys.version.split()[0]}
    about |= {"date": f"{datetime.now(UTC):%Y-%m-%d}"}
    if not dry:
        torch.ones(1, device="cuda").item()
        of_card = torch.cuda.get_device_properties(0)
        about |= {"card": of_card.name, "memory": of_card.total_memory, "cuda": torch.version.cuda}
        about["slug"] = re.sub(r"[^a-z0-9]+", "-", of_card.name.lower())
    return about


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("card", type=Path, metavar="CARD.json")
    parser.add_argument("--dry", action="store_true", help="of no card")
    args = parser.parse_args()
    args.card.write_text(json.dumps(about_this_process(args.dry)))
