"""Digests of a model folder's files, compared while its weights are loaded.

A folder that qfsdp quantized has digests of each file in its manifest: SHA-256, which says what it
is, and XXH3, which is compared at each load. Loading such a folder is little more than copying:
SHA-256 added 41 % on one rank and 73 % on two (EPYC 7003 with two busy cores), XXH3 10 and 13 %.
The hub's cache names files by their digests: SHA-256 for weights, git's SHA-1 for small files.
Other folders have none; of those, damage shows only in sizes, headers and numbers that are not
finite.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from qfsdp.checkpoint.digests import Verification
from qfsdp.checkpoint.weights.qfsdp_layout import FAST_DIGESTS, MANIFEST, SETTINGS_DIGESTS
from qfsdp.common.errors import UserError
from qfsdp.common.files import sha256
from qfsdp.common.sealed import Damaged, read_sealed

_SMALL = 64 << 20  # bytes; larger files of the hub have SHA-256


def known_digests(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, str]]:
    """File name -> {"xxh3" or "sha256": digest}, of those of `files` (weights in `folder`) whose
    digest is known."""
    if (folder / MANIFEST).is_file():
        found = _manifest(folder)
        whole, fast = (_digests(found.get(key)) for key in ("files", FAST_DIGESTS))
        return {
            f.name: {"xxh3": fast[f.name]} if f.name in fast else {"sha256": whole[f.name]}
            for f in files
            if f.name in whole
        }
    blobs = {file.name: _blob(file) for file in files}
    return {name: {"sha256": blob} for name, blob in blobs.items() if len(blob) == 64}


def _digests(listed: object) -> dict[str, str]:
    return {k: str(v) for k, v in listed.items()} if isinstance(listed, dict) else {}


def changed_settings(folder: Path) -> list[str]:
    """The small files of a folder, such as `config.json`, that are not as they were written or
    downloaded. A user may have edited them."""
    if (folder / MANIFEST).is_file():
        listed = _digests(_manifest(folder).get(SETTINGS_DIGESTS))
        return [name for name, digest in listed.items() if _digest_of(folder / name) != digest]
    small = [f for f in sorted(folder.glob("*")) if len(_blob(f)) == 40]
    return [f.name for f in small if _git_digest(f) != _blob(f)]


def _manifest(folder: Path) -> dict[str, object]:
    try:
        return read_sealed(folder / MANIFEST, older=True)
    except Damaged:
        return {}  # whoever reads the manifest reports it


def _digest_of(file: Path) -> str | None:
    try:
        return sha256(file)
    except OSError:
        return None


def _git_digest(file: Path) -> str:
    if (size := file.stat().st_size) > _SMALL:
        return _blob(file)
    return hashlib.sha1(b"blob %d\0" % size + file.read_bytes(), usedforsecurity=False).hexdigest()


def _blob(file: Path) -> str:
    """The digest by which the hub's cache names the content of a file; "" for others."""
    if not file.is_symlink():
        return ""
    target = file.resolve()
    in_cache = target.parent.name == "blobs" and target.is_file()
    return target.name if in_cache and re.fullmatch(r"[0-9a-f]{40}(.{24})?", target.name) else ""


class WeightVerification:
    """Compares the digests of a folder's weights in threads, while they are read. Each rank
    compares its share of the files, in the order in which they are read.

    Args:
        folder: of the model.
        files: its weight files.
    """

    def __init__(self, folder: Path, files: Iterable[Path]) -> None:
        self._folder = folder
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        expected = known_digests(folder, files)
        self._checks = Verification(folder, expected, rank, self._ranks)

    def own_damage(self) -> str | None:
        """How a file of this rank's share is damaged, or None; waits for all of them."""
        return self._checks.damage()

    def damage(self, unreadable: str | None) -> tuple[str | None, str | None]:
        """The first damage that any rank has found, and the first reason why one cannot use the
        weights. Every rank must call it.

        Args:
            unreadable: why this rank cannot use them.
        """
        mine = (self.own_damage(), unreadable)
        found = [mine] * self._ranks
        if self._ranks > 1:
            dist.all_gather_object(found, mine)
        damaged, failed = zip(*found, strict=True)
        return next(filter(None, damaged), None), next(filter(None, failed), None)


def refusal(folder: Path, damage: str) -> UserError:
    """The message about a damaged folder that the user named."""
    if (folder / MANIFEST).is_file():
        repair = "as recipes/quantize wrote it; the command that made the folder repairs it"
    else:
        repair = "as the hub has it: remove it, and the next start downloads it again"
    return UserError(f"{folder}: {damage}; expected it {repair}")


@contextmanager
def verified(folder: Path, files: Iterable[Path]) -> Iterator[None]:
    """Compares the digests of weights while they are read in a `with` block. At its end it raises
    UserError if a file is damaged, whatever else the block has raised."""
    checks = WeightVerification(folder, files)
    try:
        yield
    except (UserError, ValueError):
        if (damage := checks.own_damage()) is not None:
            raise refusal(folder, damage) from None
        raise
    if (damage := checks.own_damage()) is not None:
        raise refusal(folder, damage)
