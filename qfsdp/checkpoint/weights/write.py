"""Writes safetensors folders row by row: no tensor needs to exist as a whole.

A file's header gives the position of every tensor's bytes and is known before the bytes are. So a
file is laid out first, and its rows are written to their positions in any order. It is named
`<name>.partial` until it is complete: a file with its final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.read import STORED_DTYPES
from qfsdp.checkpoint.weights.safetensors_folder import INDEX, SINGLE
from qfsdp.common.files import PARTIAL, fsync, whole_file, write_json
from qfsdp.common.progress import moved

MAX_FILE_BYTES = 5_000_000_000  # the limit that Hugging Face uses
# Files of a model folder besides its weights.
COPIED = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt", "LICENSE*", "*.md")
# The first three are written for the new weights. torchtune leaves an adapter_config.json beside
# merged weights, and transformers would load the base that it names in place of the folder.
NOT_COPIED = ("config.json", INDEX, "qfsdp_packed.json", "adapter_config.json")
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in STORED_DTYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
"""dtype -> safetensors' name."""


@dataclass(frozen=True)
class Entry:
    """A tensor to write: safetensors' name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        return cls(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


Group = Mapping[str, Entry]
"""The tensors (name -> entry) that one weight is stored as; they stay in one file."""


@dataclass(frozen=True)
class PlannedFile:
    """A file's name, and its groups by the name of their weight."""

    name: str
    groups: dict[str, Group]

    @property
    def entries(self) -> dict[str, Entry]:
        """Every tensor of the file."""
        return {name: entry for group in self.groups.values() for name, entry in group.items()}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())


class SafetensorsFile:
    """A file that is being written; `finish` completes it, and `discard` removes it.

    Args:
        path: its final name.
        entries: all of its tensors, in the order of their bytes.

    Raises:
        OSError: the file cannot be written (a full disk); all methods do.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self._path, self._partial = path, path.with_name(path.name + PARTIAL)
        header, self._starts = file_header(entries)
        self._entries = entries
        self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        size = len(header) + sum(entry.size for entry in entries.values())
        try:
            self._write_bytes(memoryview(header), 0)
            os.ftruncate(self._descriptor, size)
        except OSError:
            self.discard()
            raise

    def write(self, name: str, values: Tensor, row: int = 0) -> None:
        """Writes `values` as rows of tensor `name` from `row` on, or as the whole of a scalar."""
        entry = self._entries[name]
        rest = entry.shape[1:] if entry.shape else ()
        assert DTYPE_NAMES[values.dtype] == entry.dtype and tuple(values.shape[1:]) == rest, name
        row_bytes = prod(rest) * _ITEM_BYTES[entry.dtype]
        self._write_values(values, self._starts[name] + row * row_bytes)

    def write_pieces(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Writes tensor `name` from consecutive pieces of its rows, or of those of its matrices."""
        at, entry = 0, self._entries[name]
        for piece in pieces:
            assert DTYPE_NAMES[piece.dtype] == entry.dtype, name
            at += self._write_values(piece, self._starts[name] + at)
        assert at == entry.size, name

    def finish(self) -> None:
        """Syncs the file and gives it its name."""
        fsync(self._descriptor)
        os.close(self._descriptor)
        self._partial.replace(self._path)

    def discard(self) -> None:
        """Removes what is written."""
        with suppress(OSError):
            os.close(self._descriptor)
        with suppress(OSError):
            self._partial.unlink()

    def _write_values(self, values: Tensor, offset: int) -> int:
        """Writes the numbers of a tensor; their bytes."""
        data = values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write_bytes(data.data, offset)
        return data.nbytes

    def _write_bytes(self, view: memoryview, offset: int) -> None:
        while len(view):
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written
            moved()


def file_header(entries: Mapping[str, Entry]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these tensors, and the position of each tensor in it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for name, entry in entries.items():
        offsets[name] = at
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.size],
        }
        at += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    first = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {n: first + at for n, at in offsets.items()}


def plan_files(
    groups: Mapping[str, Group], max_file_bytes: int = MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Spreads groups over files in their order. A file exceeds the maximum only with one group
    that does."""
    files: list[dict[str, Group]] = [{}]
    size = 0
    for weight, group in groups.items():
        group_size = sum(entry.size for entry in group.values())
        if files[-1] and size + group_size > max_file_bytes:
            files.append({})
            size = 0
        files[-1][weight] = group
        size += group_size
    if len(files) == 1:
        return [PlannedFile(SINGLE, files[0])]
    total = len(files)
    names = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    return [PlannedFile(name, file) for name, file in zip(names, files, strict=True)]


def write_file(
    folder: Path, planned: PlannedFile, write: Callable[[str, SafetensorsFile], None]
) -> None:
    """Writes one file to an existing folder.

    Args:
        write: `write(weight, file)` writes every tensor of that weight's group; called in the
            order of the plan.

    Raises:
        OSError: the file cannot be written. No part of it is left, as after any other error.
    """
    file = SafetensorsFile(folder / planned.name, planned.entries)
    try:
        for weight in planned.groups:
            write(weight, file)
        file.finish()
    except BaseException:
        file.discard()
        raise


def is_complete(path: Path, planned: PlannedFile) -> bool:
    """Whether the file exists with the planned header and length."""
    header, _ = file_header(planned.entries)
    size = len(header) + planned.size
    if not path.is_file() or path.stat().st_size != size:
        return False
    with open(path, "rb") as handle:
        return handle.read(len(header)) == header


def write_index(folder: Path, files: Iterable[PlannedFile]) -> None:
    """Writes the index of several files; a single file needs none."""
    files = list(files)
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.entries}
        size = sum(file.size for file in files)
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def copy_companions(source: Path, folder: Path) -> None:
    """Copies the tokenizer, generation settings and other files of a model folder, except those
    that describe its weights (`config.json`, index, manifest)."""
    for pattern in COPIED:
        for file in sorted(source.glob(pattern)):
            if file.name not in NOT_COPIED and file.is_file():
                with whole_file(folder / file.name) as partial:
                    shutil.copyfile(file, partial)
