"""Reading safetensors folders: headers first, then any rows of any tensor, ahead of their use.

A safetensors file (https://github.com/huggingface/safetensors) is a length, a JSON header and the
tensors' bytes one after another, so rows of a tensor are a contiguous range of the file.
They are read with `preadv`, straight into the memory that is to hold them or into a small ring of
buffers: nothing of the file is mapped into the process, and what it takes is bounded by the
ring, however large a tensor is.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qfsdp.cli.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""safetensors' name -> dtype. A tensor of another type can be listed but not read."""

PIECE_BYTES = 16 << 20
RING = 3  # pieces: one being read, one waiting, one being worked on


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a safetensors file.

    Fields:
        name, file: what and where it is.
        dtype: safetensors' name of its type ("BF16").
        shape: its shape.
        start, size: its bytes in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.size // max(1, self.rows)

    def as_bytes(self, rows: int) -> StoredTensor:
        """The same bytes as a uint8 matrix of `rows` rows."""
        shape = (rows, self.size // rows)
        return StoredTensor(self.name, self.file, "U8", shape, self.start, self.size)


class SafetensorsFolder:
    """The tensors of a folder: those of one `model.safetensors`, or those that an index lists.

    Opening it reads headers only.

    Attributes:
        folder: where it is.
        tensors: name -> where its bytes are.

    Raises:
        UserError: the folder, a file or a tensor that the index names is missing or cannot be
            read, or a file is truncated or no safetensors file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        expected = "expected a Hugging Face model folder"
        if not self.folder.exists():
            raise UserError(f"model.path: '{folder}' does not exist; {expected}")
        if not self.folder.is_dir():
            raise UserError(f"model.path: '{folder}' is a file; {expected}")
        self.tensors: dict[str, StoredTensor] = {}
        try:
            listed = self._read_index()
            for file in sorted(set(listed.values())) if listed else [self.folder / SINGLE]:
                self._read_header(file)
        except OSError as error:
            where = error.filename or self.folder
            raise UserError(f"{where}: cannot be read: {error.strerror or error}") from None
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise UserError(f"{self.folder / INDEX}: tensor {name!r} is not in {file.name}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def _read_index(self) -> dict[str, Path]:
        index = self.folder / INDEX
        if not index.is_file():
            return {}
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return {name: self.folder / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not a safetensors index ({error})") from None

    def _read_header(self, file: Path) -> None:
        if not file.is_file():
            raise UserError(f"{file} does not exist; the model's weights are read from it")
        with open(file, "rb") as handle:
            try:
                with safe_open(file, framework="pt"):
                    pass  # the library's own look at header and length
            except SafetensorError as error:
                raise UserError(f"{file}: truncated or not a safetensors file ({error})") from None
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            start = 8 + length + begin
            self.tensors[name] = StoredTensor(name, file, entry["dtype"], shape, start, end - begin)

    def read(self, tensor: StoredTensor) -> Tensor:
        """A whole tensor on the CPU, in the dtype of the file."""
        values = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        with closing(OpenFiles()) as files:
            files.read_rows(tensor, 0, values)
        return values


class OpenFiles:
    """Reads rows of tensors; opens each file at its first read and keeps it open."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def read_rows(self, tensor: StoredTensor, row: int, into: Tensor) -> None:
        """Fills a contiguous CPU tensor with the bytes of `tensor` from row `row` on.

        Raises:
            UserError: the file ends within the tensor.
        """
        if not into.numel():
            return
        if tensor.file not in self._descriptors:
            self._descriptors[tensor.file] = os.open(tensor.file, os.O_RDONLY)
        descriptor = self._descriptors[tensor.file]
        view = into.reshape(-1).view(torch.uint8).numpy().data
        offset = tensor.start + row * tensor.row_bytes
        while len(view):
            got = os.preadv(descriptor, [view], offset)
            if not got:
                raise UserError(f"{tensor.file}: truncated: it ends within tensor {tensor.name!r}")
            view, offset = view[got:], offset + got

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


@dataclass(frozen=True)
class Read:
    """One entry of what a `RowStream` is to read.

    Fields:
        tensor: of which
        rows: these consecutive rows are read.
        device: where its pieces are wanted.
        into: a contiguous CPU tensor for exactly these bytes, or None. With it nothing passes
            through the ring: the pieces are views of it.
    """

    tensor: StoredTensor
    rows: range
    device: torch.device
    into: Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.rows) * self.tensor.row_bytes


class RowStream:
    """Reads a list of row ranges ahead, in a thread, while their consumer works on them.

    `next_read()` gives the pieces of the first entry, the next call those of the second, and so
    on. A piece is `[n, *shape[1:]]` of at most 16 MB, and valid until the next is asked for. On
    an accelerator pieces come through pinned memory, copied while others are read.
    Use it as a context manager: leaving it ends the thread.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self._reads = reads
        self._spare: Queue[Tensor | None] = Queue()
        self._ready: Queue[tuple[Tensor, Tensor | None] | BaseException | None] = Queue()
        size = max([PIECE_BYTES, *(r.tensor.row_bytes for r in reads if r.into is None)])
        pinned = any(r.device.type != "cpu" for r in reads)
        for _ in range(RING):
            self._spare.put(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        self._stopped = False
        self._at = 0
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __enter__(self) -> RowStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._spare.put(None)
        self._thread.join()

    def next_read(self) -> Iterator[Tensor]:
        """The pieces of the next entry, in order; at least one, which may have no rows.

        Raises what went wrong while they were read.
        """
        read = self._reads[self._at]
        self._at += 1
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            piece, buffer = item
            if piece.device == read.device:
                yield piece
            else:
                yield piece.to(read.device, non_blocking=True)
                torch.accelerator.current_stream(read.device).synchronize()
            if buffer is not None:
                self._spare.put(buffer)

    def _run(self) -> None:
        with closing(OpenFiles()) as files:
            try:
                for read in self._reads:
                    for rows in _pieces(read):
                        if (item := self._place(read, rows)) is None:
                            return
                        files.read_rows(read.tensor, rows.start, item[0])
                        self._ready.put(item)
                    self._ready.put(None)
            except BaseException as error:  # raised again by `next_read`
                self._ready.put(error)

    def _place(self, read: Read, rows: range) -> tuple[Tensor, Tensor | None] | None:
        """Where the piece is read to, and the buffer that it takes of the ring, if it does; None
        once nobody wants it any more."""
        if self._stopped:
            return None
        if read.into is not None:
            first = read.rows.start
            return read.into[rows.start - first : rows.stop - first], None
        buffer = self._spare.get()
        if buffer is None:
            return None
        size = len(rows) * read.tensor.row_bytes
        piece = buffer[:size].view(DTYPES[read.tensor.dtype])
        return piece.view(len(rows), *read.tensor.shape[1:]), buffer


def _pieces(read: Read) -> Iterator[range]:
    step = max(1, PIECE_BYTES // max(1, read.tensor.row_bytes))
    for start in range(0, max(1, len(read.rows)), step):
        yield read.rows[start : start + step]
