"""Reading ahead, with a progress bar of the bytes read."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from qfsdp.checkpoint.weights.read import Read, RowStream
from qfsdp.common.long_waits import long_wait
from qfsdp.common.progress import moved
from qfsdp.common.terminal import bar

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
    """Bytes read by this rank: a bar with rate and time left where there is a terminal, a line if
    it takes long where there is none, and a line at the end."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._since = time.perf_counter()
        self._bar = bar(
            total=total,
            desc="loading",
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not shown,
        )
        self._open = ExitStack()

    def __enter__(self) -> Progress:
        if self._shown and self._bar.disable:
            self._open.enter_context(long_wait(f"loading {self._total / 2**30:.2f} GiB"))
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        self._open.close()
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
            moved()
            self._bar.update(piece.numel() * piece.element_size())
