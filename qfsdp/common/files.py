"""Writes files whole: a file with its final name is complete and on disk.

A file is written as `<name>.partial`, synced and renamed. If that fails (a full disk), the partial
file is removed and an earlier file of that name is unchanged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import resource
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line
from qfsdp.common.sizes import format_size
from qfsdp.common.terminal import warn

PARTIAL = ".partial"
DAMAGED = (OSError, EOFError, zlib.error, RecursionError, OverflowError)
"""What reading a damaged file raises; zlib of a .gz."""
POINTER = b"version https://git-lfs"


def check_no_pointer(file: Path) -> None:
    """Raises UserError if a clone has left a pointer of Git LFS in the place of a file."""
    with file.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            raise UserError(f"{file}: a pointer of Git LFS, not the file; expected `git lfs pull`")


def to_json(content: Any, **options: Any) -> str:
    """Strict JSON (RFC 8259), which has no NaN and no infinity: these are written as null.

    Args:
        options: of `json.dumps`.
    """
    try:
        return json.dumps(content, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_with_null(content), allow_nan=False, **options)


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none: whoever needs the file says why."""
    try:
        found = json.loads(file.read_bytes()) if file.is_file() else None  # a pipe has no end
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_null(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _with_null(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_with_null(value) for value in content]
    return content


def sha256(file: Path) -> str:
    """The hex digest of a file's bytes."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def xxh3(file: Path) -> str:
    """XXH3 of a file's bytes, 128 bits in hex: it finds damage at five times the rate of SHA-256
    (4.9 GB/s on a core of an EPYC 7003; SHA-256 1.0), but anybody can make a file to a digest."""
    import xxhash

    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The file to write within a `with` block; it is renamed to `path` at the end of the block.
    Raises OSError: it cannot be written."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        # Created first, for the permissions that the umask gives: safetensors puts a file with 0600
        # in its place, which other users could not read.
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        with suppress(PermissionError):  # FAT and some network file systems have no modes
            partial.chmod(mode)
        sync(partial)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole. Raises OSError if it cannot be written."""
    with whole_file(path) as partial:
        # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, becomes its escape.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole. Raises OSError if it cannot be written."""
    write_text(path, to_json(content, indent=2) + "\n")


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync(descriptor: int) -> None:
    """Syncs to disk, where the file system can: some network and FUSE file systems cannot sync
    folders, or anything."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def sync_folder(folder: Path) -> None:
    """Syncs everything in a folder to disk, then the folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Syncs `new` and renames it to `folder`. At any time `folder` or `<folder>.replaced` is
    complete; see `recover_folder`. In place of a link comes the folder itself."""
    sync_folder(new)
    replaced = _replaced(folder)
    if os.path.lexists(folder):
        _remove(replaced)
        folder.rename(replaced)
    new.rename(folder)
    _remove(replaced)


def _remove(path: Path) -> None:
    """Removes a folder, or a file or a link in its place, as far as it can."""
    if path.is_dir() and not path.is_symlink():
        return shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def recover_folder(folder: Path) -> None:
    """Undoes a `replace_folder` that was interrupted between its renames."""
    if _replaced(folder).exists() and not folder.exists():
        _replaced(folder).rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


# ---- messages ------------------------------------------------------------------------------------


def why(error: BaseException) -> str:
    """Why a file could not be read or written: "No space left on device".

    Libraries in Rust put the system's error number in the text of their own exceptions.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = first_line(error)
    found = re.search(r"\(os error (\d+)\)", text)
    return os.strerror(int(found[1])) if found else text


def not_written(path: Path, error: BaseException, size: int | None = None) -> str:
    """The message about a file or folder that cannot be written.

    Args:
        size: bytes that it needs, if they are known; the message then tells the free space.
    """
    text = f"'{path}' cannot be written: {why(error)}"
    if size is not None and (free := free_bytes(path)) is not None and free < size:
        text += f"; expected {format_size(size)} of free space, found {format_size(free)}"
    return text


@contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """A `with` block that writes `path`, which config `key` names; raises UserError if it fails."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{key}: {not_written(path, error)}") from None


def free_bytes(path: Path) -> int | None:
    """Free bytes of the file system where `path` is or will be; None if they are not known."""
    with suppress(OSError):
        return shutil.disk_usage(nearest_existing(path)).free
    return None


def allow_files(wanted: int) -> int:
    """Raises this process's limit of open files to `wanted`, or as far as it may; returns how many
    of `wanted` it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)


def nearest_existing(path: Path) -> Path:
    """`path`, or the first folder above it that exists. A name that is too long does not exist."""
    return next(p for p in (path, *path.absolute().parents) if os.path.exists(p))


def warn_of_space(key: str, path: Path, size: int) -> None:
    """Prints a warning if fewer than `size` bytes are free for `path`, the value of config `key`.

    Args:
        size: that is written at least.

    No error, as a file system may compress.
    """
    free = free_bytes(path)
    if free is not None and free < size:
        warn(
            f"{key}: '{path}' has {format_size(free)} of free space; expected at least "
            f"{format_size(size)}, which this run writes"
        )


def check_folder(key: str, folder: Path) -> None:
    """Raises UserError if files cannot be written to a folder, which config `key` names, or to the
    folder in which it would be made, or if it would be named after a variable, as "$HOME/run" is.
    Makes no folder: other machines may try the same one."""
    if variable := re.match(r"\$\{?(\w+)\}?(/|$)", str(folder)):
        expected = f"expected ${{oc.env:{variable[1]}}} in its place, which reads it"
        raise UserError(f"{key}: '{folder}' begins with a variable that stays text; {expected}")
    with writing(key, folder):
        paths = (folder, *folder.parents)
        there = next(path for path in paths if path.exists() or path.is_symlink())
        tempfile.TemporaryFile(dir=there).close()  # /proc exists, and takes no files
