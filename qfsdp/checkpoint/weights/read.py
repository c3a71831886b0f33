"""Reads any rows of any tensor of safetensors files, ahead of their use, and shows how far it is.

A safetensors file (https://github.com/huggingface/safetensors) is a length, a JSON header and the
tensors' bytes one after another, so rows of a tensor are a contiguous range of the file. They are
read with `preadv`, straight into their final memory or into a small ring of buffers. No file is
mapped into the process, and the ring bounds the memory, however large a tensor is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.common.files import why
from qfsdp.common.long_waits import long_wait
from qfsdp.common.progress import NOW
from qfsdp.common.terminal import bar

STORED_DTYPES = {
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
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""safetensors' name -> dtype. A tensor of another type can be listed but not read."""

PIECE_BYTES = 16 << 20
RING_PIECES = 3  # one being read, one waiting, one in use


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a safetensors file.

    Fields:
        name, shape: as in the file's header.
        file: where it is.
        dtype: safetensors' name of its dtype ("BF16").
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
        """Bytes of one row."""
        return self.size // max(1, self.rows)

    def wrong(self, what: str, name: str | None = None) -> UserError:
        """That the tensor is not as it should be: `what` follows its file and its name, or the
        name of the parameter that it holds."""
        return UserError(f"{self.file}: tensor {(name or self.name)!r} {what}")

    def as_bytes(self, rows: int) -> StoredTensor:
        """The same bytes as a uint8 matrix of `rows` rows."""
        shape = (rows, self.size // rows)
        return StoredTensor(self.name, self.file, "U8", shape, self.start, self.size)


@dataclass(frozen=True)
class ComputedTensor(StoredTensor):
    """A tensor whose rows are computed from others; `start` is not used."""

    def fill(self, files: OpenFiles, row: int, into: Tensor) -> None:
        """Fills a contiguous CPU tensor with the rows from `row` on."""
        raise NotImplementedError


@dataclass(frozen=True)
class StackedTensor(StoredTensor):
    """Matrices of equal shape as one: the rows of one after those of another.

    Fields:
        parts: where they are; in any files.
        transposed: the rows of this tensor are the columns of the parts.
    """

    parts: tuple[StoredTensor, ...] = ()
    transposed: bool = False

    @classmethod
    def of(
        cls, name: str, parts: Sequence[StoredTensor], transposed: bool = False
    ) -> StackedTensor:
        """The stack of `parts`, all of one shape and dtype. Raises UserError: `transposed`, and
        numbers are computed, not stored."""
        first, size = parts[0], sum(part.size for part in parts)
        if transposed and isinstance(first, ComputedTensor):
            raise first.wrong("is in FP8, and its columns are read; expected 16 bits", name)
        rows, *rest = first.shape[::-1] if transposed else first.shape
        shape = (rows * len(parts), *rest)
        return cls(name, first.file, first.dtype, shape, 0, size, tuple(parts), transposed)

    @classmethod
    def of_transposed(cls, name: str, stored: StoredTensor) -> StackedTensor:
        """The rows `[experts * out, in]` of `[experts, in, out]`."""
        size = stored.row_bytes
        starts = [stored.start + index * size for index in range(stored.rows)]
        parts = [replace(stored, shape=stored.shape[1:], start=at, size=size) for at in starts]
        return cls.of(name, parts, transposed=True)

    def split(self, row: int, into: Tensor) -> Iterator[tuple[StoredTensor, int, Tensor]]:
        """(part, its first row, its slice of `into`) for the rows from `row` on."""
        if self.rows < len(self.parts):  # each row is several parts
            of_row = len(self.parts) // self.rows
            for at, whole in enumerate(into):
                for index, some in enumerate(whole.chunk(of_row)):
                    yield self.parts[(row + at) * of_row + index], 0, some
            return
        height, at = self.rows // len(self.parts), 0
        while at < len(into):
            index, first = divmod(row + at, height)
            some = into[at : at + height - first]
            yield self.parts[index], first, some
            at += len(some)


class OpenFiles:
    """Reads rows of tensors; each file is opened at its first read and stays open."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def read_rows(self, tensor: StoredTensor, row: int, into: Tensor) -> None:
        """Fills a contiguous CPU tensor with the bytes of `tensor` from row `row` on. Raises
        UserError: the file cannot be read, or ends within the tensor."""
        if not into.numel():
            return
        if isinstance(tensor, ComputedTensor):
            return tensor.fill(self, row, into)
        if isinstance(tensor, StackedTensor):
            for part, first, some in tensor.split(row, into):
                if tensor.transposed:
                    self._read_columns(part, first, some.flatten(0, -2))
                else:
                    self.read_rows(part, first, some)
            return
        self._read_bytes(tensor, tensor.start + row * tensor.row_bytes, into)

    def _read_columns(self, tensor: StoredTensor, first: int, into: Tensor) -> None:
        """Fills `into` with columns of `tensor` from `first` on, as rows."""
        columns = torch.empty(tensor.rows, len(into), dtype=into.dtype)
        start = tensor.start + first * into.element_size()
        if len(into) == tensor.shape[1]:
            self._read_bytes(tensor, start, columns)
        else:
            for row, values in enumerate(columns):
                self._read_bytes(tensor, start + row * tensor.row_bytes, values)
        into.copy_(columns.t())

    def _read_bytes(self, tensor: StoredTensor, offset: int, into: Tensor) -> None:
        view = into.reshape(-1).view(torch.uint8).numpy().data
        # What follows are the bytes of other tensors.
        assert offset + len(view) <= tensor.start + tensor.size, tensor.name
        try:
            if tensor.file not in self._descriptors:
                self._descriptors[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            while len(view):
                got = os.preadv(self._descriptors[tensor.file], [view], offset)
                if not got:
                    truncated = f"truncated: it ends within tensor {tensor.name!r}"
                    raise UserError(f"{tensor.file}: {truncated}")
                view, offset = view[got:], offset + got
        except OSError as error:
            raise UserError(f"{tensor.file}: cannot be read: {why(error)}") from None

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)


@dataclass(frozen=True)
class Read:
    """Rows of a tensor for a `RowStream` to read.

    Fields:
        tensor, rows: consecutive rows of a stored tensor.
        device: where the pieces are used.
        into: a contiguous CPU tensor for exactly these bytes, or None. If given, the bytes are
            read straight into it, and the pieces are views of it.
    """

    tensor: StoredTensor
    rows: range
    device: torch.device
    into: Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return len(self.rows) * self.tensor.row_bytes


class RowStream:
    """Reads rows in a thread, ahead of the code that uses them.

    `next_read()` yields the pieces of the first read, the next call those of the second, and so
    on. A piece is `[n, *shape[1:]]` of at most 16 MB, and valid until the next one is asked for.
    On an accelerator, pieces are copied through pinned memory while others are read. Use it as a
    context manager: leaving it ends the thread.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self._reads = reads
        self._free: Queue[Tensor | None] = Queue()
        self._ready: Queue[tuple[Tensor, Tensor | None] | BaseException | None] = Queue()
        size = max([PIECE_BYTES, *(r.tensor.row_bytes for r in reads if r.into is None)])
        pinned = any(r.device.type != "cpu" for r in reads)
        for _ in range(RING_PIECES):
            self._free.put(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        self._stopped = False
        self._next = 0
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __enter__(self) -> RowStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._free.put(None)
        self._thread.join()

    def next_read(self) -> Iterator[Tensor]:
        """The pieces of the next read, at least one; raises the error that stopped the thread."""
        read = self._reads[self._next]
        self._next += 1
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
                self._free.put(buffer)

    def _run(self) -> None:
        with closing(OpenFiles()) as files:
            try:
                for read in self._reads:
                    step = max(1, PIECE_BYTES // max(1, read.tensor.row_bytes))
                    for start in range(0, max(1, len(read.rows)), step):
                        rows = read.rows[start : start + step]
                        if (item := self._target(read, rows)) is None:
                            return
                        files.read_rows(read.tensor, rows.start, item[0])
                        self._ready.put(item)
                    self._ready.put(None)
            except BaseException as error:  # raised again by `next_read`
                self._ready.put(error)

    def _target(self, read: Read, rows: range) -> tuple[Tensor, Tensor | None] | None:
        """The memory for a piece, and its ring buffer, if any; None if the thread should end."""
        if self._stopped:
            return None
        if read.into is not None:
            first = read.rows.start
            return read.into[rows.start - first : rows.stop - first], None
        buffer = self._free.get()
        if buffer is None:
            return None
        size = len(rows) * read.tensor.row_bytes
        piece = buffer[:size].view(STORED_DTYPES[read.tensor.dtype])
        return piece.view(len(rows), *read.tensor.shape[1:]), buffer


# ---- with a bar ----------------------------------------------------------------------------------

Pieces = Iterator[Iterator[Tensor]]
"""For each read, in order, the iterator over its pieces."""


@contextmanager
def streamed(reads: Sequence[Read], progress: bool) -> Iterator[Pieces]:
    """Reads ahead in a thread (`RowStream`) within a `with` block.

    Args:
        progress: show a bar, or one line at the end where standard error is no terminal.

    Yields:
        The pieces of every read, in order.
    """
    with RowStream(reads) as stream, Progress(sum(r.size for r in reads), progress) as bar:
        yield (bar.count(stream.next_read()) for _ in reads)


class Progress:
    """Shows how many bytes this rank has read. A terminal gets a bar with rate and time left;
    other outputs get a line if it takes long. Both get a line at the end."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._since = time.perf_counter()
        self._open = ExitStack()
        self._bar: Any = None
        if shown:
            self._bar = bar(total=total, desc="loading", unit="B", unit_scale=True, leave=False)

    def __enter__(self) -> Progress:
        if self._shown and self._bar.disable:
            self._open.enter_context(long_wait(f"loading {self._total / 2**30:.2f} GiB"))
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        self._open.close()
        if self._shown:
            self._bar.close()
        if self._shown and error is None:
            seconds = max(time.perf_counter() - self._since, 1e-9)
            rate = self._total / 1e6 / seconds
            size = f"{self._total / 2**30:.2f} GiB in {seconds:.1f} s"
            print(f"loaded {size} ({rate:.0f} MB/s per rank)", file=sys.stderr, flush=True)

    def count(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same pieces, counted as they pass."""
        for piece in pieces:
            yield piece
            NOW.moves += 1
            if self._shown:
                self._bar.update(piece.numel() * piece.element_size())
