"""Tokenized datasets on disk, which all ranks of a machine map into memory.

    <tokenized_cache>/<key>/tokens.bin    int32, all samples one after the other
                            labels.bin    int32
                            ends.bin      int64, the end of each sample
                            summary.json  counts for the log, the sizes and the SHA-256 of the
                                          files, and its own
    <tokenized_cache>/<key>.lock          held by the process that tokenizes

The key is a hash of everything that decides the tokens: the contents of data files (the fingerprint
of `datasets` for hub names), the builder and its arguments, the tokenizer with its chat template,
and the code. The folder gets its name when it is complete, so one that was cut off is never read.
Digests are compared at every start, and a damaged dataset is tokenized again.
Whoever has the lock tokenizes; the other ranks and runs wait and then map the files. Mapped pages
are shared: N ranks hold the data once, and the system may drop them. To clear the cache, delete
the folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import shutil
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from qfsdp.common.file_digests import range_digests
from qfsdp.common.files import PARTIAL, allow_files, replace_folder, why, write_text
from qfsdp.common.long_waits import long_wait
from qfsdp.common.progress import moved
from qfsdp.common.sealed import Damaged, read_sealed, sealed_json
from qfsdp.common.terminal import warn
from qfsdp.data.files.rows import Rows, content_digest

DTYPES = {"tokens": np.int32, "labels": np.int32, "ends": np.int64}
SUMMARY_FILE = "summary.json"
MAPPED_FILES = 1 << 16  # a mapped file stays open: 340 datasets are over 1,024, a usual limit
_RANK_0_FIRST_S = 0.5
_LIBRARIES = ("tokenizers", "jinja2", "datasets", "torchtune", "sentencepiece", "tiktoken")

Arrays = dict[str, Any]
"""Name -> flat array, as in `DTYPES`."""


def cache_key(builder: Mapping[str, Any], tokenizer: Any, rows: Rows, source: str) -> str:
    """The name of a tokenized dataset. Reads the data files once, at 1 GB/s or more.

    Args:
        builder: `_component_` and the arguments.
    """
    arguments = {name: value for name, value in builder.items() if name != "source"}
    parts = {
        "builder": arguments,
        "tokenizer": tokenizer_digest(tokenizer),
        "rows": content_digest(source) or f"{source} {getattr(rows, '_fingerprint', None)}",
        "count": len(rows),
        "code": _code_digest(str(builder["_component_"])),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of what a tokenizer does: its `fingerprint`, or of its pickle for torchtune's."""
    from datasets.fingerprint import Hasher

    known = getattr(tokenizer, "fingerprint", None)
    return str(known) if known is not None else str(Hasher.hash(tokenizer))


def _code_digest(component: str) -> str:
    """A hash of `_own_code` and of the builder's file."""
    digest = hashlib.sha256(_own_code().encode())
    with suppress(Exception):  # a component without a file
        module = importlib.import_module(component.rpartition(".")[0])
        digest.update(Path(inspect.getfile(module)).read_bytes())
    return digest.hexdigest()


@cache
def _own_code() -> str:
    """A hash of the code of qfsdp and of the libraries' versions: 35 ms, for each of 1,000 held-out
    sets."""
    digest = hashlib.sha256(sys.version.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}".encode())
    return digest.hexdigest()


class ArrayWriter:
    """Appends to flat arrays: in files, or in memory if the files cannot be written.

    Args:
        folder: a new folder for the files; None: in memory.
        on_failure: is told where and why the files cannot be written. What they have is read back.
    """

    def __init__(
        self, folder: Path | None, on_failure: Callable[[Path, BaseException], None]
    ) -> None:
        self._folder, self._on_failure = folder, on_failure
        self._sizes = dict.fromkeys(DTYPES, 0)
        self._digests = {name: hashlib.sha256() for name in DTYPES}
        self._memory: dict[str, bytearray] = {name: bytearray() for name in DTYPES}
        if folder is not None:
            with self._falling_back():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)

    def append(self, arrays: Mapping[str, bytes]) -> None:
        """Adds bytes to every array. `ends` count from the start of the whole array."""
        with self._falling_back():
            for name, data in arrays.items():
                if self._folder is None:
                    self._memory[name] += data
                    continue
                with (self._folder / f"{name}.bin").open("ab") as file:
                    file.truncate(self._sizes[name])
                    file.write(data)
                self._digests[name].update(data)
            self._sizes = {name: size + len(arrays[name]) for name, size in self._sizes.items()}
            return
        self.append(arrays)  # in memory now

    def finish(self, summary: Mapping[str, Any], final: Path | None) -> Arrays:
        """Completes the files as folder `final`, and returns the arrays."""
        with self._falling_back():
            if self._folder is not None and final is not None:
                sizes = dict(self._sizes)
                for name in sizes:
                    (self._folder / f"{name}.bin").touch()
                files = {name: digest.hexdigest() for name, digest in self._digests.items()}
                written = sealed_json({**summary, "bytes": sizes, "files": files})
                write_text(self._folder / SUMMARY_FILE, written)
                replace_folder(self._folder, final)
                return _mapped(final, sizes)
        codes = {"tokens": "i", "labels": "i", "ends": "q"}
        return {name: array(codes[name], bytes(data)) for name, data in self._memory.items()}

    def discard(self) -> None:
        """Removes the files of a dataset that is not complete."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _falling_back(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._folder is None:
                raise
            for name, size in self._sizes.items():
                with suppress(FileNotFoundError):
                    data = (self._folder / f"{name}.bin").read_bytes()
                    self._memory[name] = bytearray(data[:size])
            shutil.rmtree(self._folder, ignore_errors=True)
            failed, self._folder = self._folder.parent, None
            self._on_failure(failed, error)


def read_arrays(folder: Path, tell: bool = False) -> tuple[Arrays, dict[str, Any]] | None:
    """The mapped arrays and the summary of a complete dataset; None if it is missing or damaged.

    Args:
        tell: warn of a damaged one.
    """
    if not folder.exists():
        return None
    try:
        summary = read_sealed(folder / SUMMARY_FILE)
        sizes, digests = summary.pop("bytes"), summary.pop("files")
        found = range_digests([(folder / f"{name}.bin", 0, sizes[name]) for name in DTYPES])
        for name, digest in zip(DTYPES, found, strict=True):
            if (folder / f"{name}.bin").stat().st_size != sizes[name]:
                raise Damaged(f"{name}.bin: wrong size")
            if digest != digests[name]:
                raise Damaged(f"{name}.bin: content changed (SHA-256)")
        return _mapped(folder, sizes), summary
    except (Damaged, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if tell:
            reason = why(error) if isinstance(error, OSError) else error
            warn(f"tokenized_cache: '{folder}' is damaged: {reason}; tokenizing again")
        return None


def _mapped(folder: Path, sizes: Mapping[str, int]) -> Arrays:
    allow_files(MAPPED_FILES)
    return {
        # An empty file cannot be mapped.
        name: np.memmap(folder / f"{name}.bin", kind, "r") if sizes[name] else np.empty(0, kind)
        for name, kind in DTYPES.items()
    }


@contextmanager
def locked(folder: Path, source: str) -> Iterator[None]:
    """Holds the lock of a dataset. The system releases it when the process ends, however it ends.
    Raises OSError: the cache cannot be written, or its file system has no locks."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_RANK_0_FIRST_S)  # its bar and its messages are the ones that people see
    seen = 0
    with long_wait(f"waiting for another process that tokenizes {source}"):
        while True:
            try:
                lock.acquire(timeout=1)
                break
            except Timeout:
                if (size := _written(folder)) != seen:  # else whoever tokenizes may hang
                    seen = size
                    moved()
            except NotImplementedError as error:
                raise OSError(str(error)) from None
    try:
        yield
    finally:
        lock.release()


def partial_folder(folder: Path) -> Path:
    """Where the files of a dataset lie until it is complete."""
    return folder.with_name(folder.name + PARTIAL)


def _written(folder: Path) -> int:
    try:
        return (partial_folder(folder) / "tokens.bin").stat().st_size
    except OSError:
        return 0


def warn_not_kept(folder: Path, error: BaseException) -> None:
    """Says once per run that tokens cannot be kept."""
    if os.environ.get("RANK", "0") == "0":
        warn(
            f"tokenized_cache: '{folder}' cannot be written: {why(error)}; the tokens "
            "stay in memory and are made again at the next start"
        )
