"""Digests of a checkpoint's files: written with them, and compared before they are used.

`facts.json` has the size and the SHA-256 of every other file, and its own (`qfsdp.common.sealed`).
It holds no secret: whoever changes a file on purpose can change its digest as well. So digests find
damage, and `state_files` makes sure that no file can run code.

SHA-256 is the fastest of the standard library's strong digests on CPUs with instructions for it:
1.2 GB/s on one core of a Xeon (blake2b 0.9, SHA-512 0.7; crc32, which is not strong, 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qfsdp.common.files import sha256, xxh3
from qfsdp.common.progress import moved
from qfsdp.common.sealed import Damaged

THREADS = 4  # of a rank that compares digests


# ---- one file ------------------------------------------------------------------------------------


def describe_file(path: Path) -> dict[str, Any]:
    """The size in bytes and the digest of a file, as `facts.json` has them."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def check_size(path: Path, name: str, expected: Mapping[str, Any]) -> None:
    """Raises `Damaged` unless a file is there and as large as written."""
    try:
        if not path.exists():
            raise Damaged(f"{name}: missing")
        if not path.is_file():
            raise Damaged(f"{name}: not a file")
        size = path.stat().st_size
    except OSError as error:
        raise Damaged(f"{name}: unreadable ({error.strerror})") from None
    if size != expected["bytes"]:
        raise Damaged(f"{name}: {size} bytes instead of {expected['bytes']}")


def _check_content(path: Path, name: str, expected: Mapping[str, Any]) -> None:
    try:
        found = {"xxh3": xxh3(path)} if "xxh3" in expected else describe_file(path)
        moved()
    except OSError as error:
        raise Damaged(f"{name}: unreadable ({error.strerror})") from None
    if any(found[key] != value for key, value in expected.items()):
        kind = "XXH3" if "xxh3" in found else "SHA-256"
        raise Damaged(f"{name}: content changed ({kind})")


class Verification:
    """Compares the digests of this rank's share of a checkpoint's files, in threads.

    Reading and hashing leave Python's lock, so that the rank reads the files meanwhile.

    Args:
        files: name -> size and digest (`describe_file`), or a digest alone ("sha256" or "xxh3");
            in the order of their names if the sizes are not known.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, Mapping[str, Any]], rank: int, ranks: int
    ) -> None:
        largest_first = sorted(files, key=lambda name: (-files[name].get("bytes", 0), name))
        self._pool = ThreadPoolExecutor(THREADS, "verify")
        self._jobs = [
            self._pool.submit(_check_content, folder / name, name, files[name])
            for name in largest_first[rank::ranks]
        ]

    def damage(self) -> str | None:
        """How a file of the share is damaged, or None; waits for all of them."""
        self._pool.shutdown()
        errors = [job.exception() for job in self._jobs]
        for error in errors:
            if error is not None and not isinstance(error, Damaged):
                raise error
        return next((str(error) for error in errors if error is not None), None)
