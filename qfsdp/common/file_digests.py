"""Digests of whole files, which are remembered as long as the files are the same.

A file is the same while its device, inode, size, and both its times are: mtime, which programs can
set, and ctime, which the kernel sets at every change. Digests are kept in
`$HF_HOME/qfsdp-digests/`, so that a base of 140 GB is hashed once per machine and not at every
start. That folder may be deleted at any time.

On two cores of a Zen 3, a base of 4 GB in the page cache takes 1.7 s of both cores (2.4 GB/s), and
0.3 ms when it is remembered.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from qfsdp.common.devices import cores
from qfsdp.common.files import write_text
from qfsdp.common.progress import moved

CHUNK = 2**24
THREADS = 8
SETTLED_S = 2.0  # a file changed again within a tick of the clock would have the same times

_known: dict[str, str] = {}


def remembered(files: Sequence[Path], purpose: str, compute: Callable[[], str]) -> str:
    """The result of `compute`, which reads `files`; kept in memory and on disk.

    Args:
        purpose: what is computed; other purposes have other results.

    Raises:
        OSError: a file cannot be read.
    """
    identity = _identity(files)
    key = hashlib.sha256(f"{purpose} {identity}".encode()).hexdigest()
    if (found := _known.get(key) or _read(key)) is None:
        began = time.time()
        found = compute()
        newest = max((max(times[3:]) for times in json.loads(identity)), default=0) / 1e9
        if _identity(files) != identity or not newest < began - SETTLED_S:
            return found  # it may have changed while it was read
        with suppress(OSError):  # a home that is full, or not ours
            _folder().mkdir(parents=True, exist_ok=True)
            write_text(_folder() / key, found)
    _known[key] = found
    return found


def file_digest(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    return remembered([file], "sha256", lambda: range_digest(file, 0, file.stat().st_size))


def range_digest(file: Path, start: int, size: int) -> str:
    """The SHA-256 of `size` bytes of a file. Hashing leaves Python's lock."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(start)
        while size > 0 and (data := stream.read(min(CHUNK, size))):
            digest.update(data)
            size -= len(data)
            moved()
    return digest.hexdigest()


def range_digests(ranges: Sequence[tuple[Path, int, int]]) -> list[str]:
    """`range_digest` of several ranges, in threads."""
    with ThreadPoolExecutor(min(THREADS, cores()), "digest") as pool:
        return list(pool.map(lambda part: range_digest(*part), ranges))


def _identity(files: Sequence[Path]) -> str:
    stats = [file.stat() for file in files]
    return json.dumps(
        [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in stats]
    )


def _folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "qfsdp-digests"


def _read(key: str) -> str | None:
    """A kept digest: 64 hex digits."""
    with suppress(OSError, ValueError):
        text = (_folder() / key).read_text()
        if len(text) == 64 and int(text, 16) >= 0:
            return text
    return None
