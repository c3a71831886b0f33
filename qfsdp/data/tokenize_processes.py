"""Tokenizes rows in several processes, in order.

The processes are started afresh (spawned): a fork of a process in which torch, NCCL or a tokenizer
have threads may hang. They import torch and torchtune, which takes seconds, so short work is done
in this process, and longer work goes on here until they are ready.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Protocol

from qfsdp.common.errors import UserError
from qfsdp.common.files import why
from qfsdp.common.long_waits import long_wait
from qfsdp.common.quiet import quiet_torchao
from qfsdp.common.terminal import warn
from qfsdp.launch.signals import ignore_stop_signals

ALONE_S = 5.0  # work that takes less is not worth new processes
AHEAD = 4  # pieces per process that may wait for their turn


class Work(Protocol):
    """A long piece of work in numbered parts."""

    def __call__(self, start: int, stop: int) -> Any: ...


_work: Any = None  # of a worker process


def in_order(work: Work, count: int, size: int, processes: int, at_once: bool) -> Iterator[Any]:
    """The results of `work(start, stop)` for pieces of `size` of `count` items, in order.

    Args:
        work: must be picklable by dill; what it raises is raised here in its place.
        at_once: use the processes from the first piece on, however short the work is.

    Raises:
        UserError: a process was ended from outside.
    """
    pieces = [(start, min(start + size, count)) for start in range(0, count, size)]
    began, at = time.monotonic(), 0
    pool: ProcessPoolExecutor | None = None
    first: Future[Any] | None = None
    alone = processes == 1
    try:
        while at < len(pieces):
            if first is not None and (at_once or first.done()):
                with long_wait(f"starting {processes} processes that tokenize"):
                    _result(first)
                break
            if pool is None and not alone and (at_once or time.monotonic() - began > ALONE_S):
                try:
                    pool, first = _started(work, processes)
                except (OSError, ImportError) as error:  # /dev/shm is missing, read-only or full
                    told = f"no process was started ({why(error)}); one goes on alone"
                    warn(f"dataset.processes: {told}")
                    alone = True
                continue
            yield work(*pieces[at])
            at += 1
        waiting: deque[Future[Any]] = deque()
        for piece in pieces[at:]:
            assert pool is not None
            waiting.append(pool.submit(_call, *piece))
            if len(waiting) > AHEAD * processes:
                yield _result(waiting.popleft())
        yield from map(_result, waiting)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _started(work: Work, processes: int) -> tuple[ProcessPoolExecutor, Future[Any]]:
    """Processes, and what is done when the first of them is ready. Raises OSError, ImportError."""
    import dill

    given = (dill.dumps(work), sys.path)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, given)
    with _without_main():
        return pool, pool.submit(_nothing)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool:
        raise _ended() from None


@contextmanager
def _without_main() -> Iterator[None]:
    """Keeps spawned processes from importing the main module: the whole recipe, for nothing."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Background:
    """One process that does one piece of work after the other, on request.

    Args:
        work: what it does; must be picklable by dill.
    """

    def __init__(self, work: Any) -> None:
        import dill

        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (dill.dumps(work), sys.path, theirs)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with _without_main():
            self._process.start()
        theirs.close()
        atexit.register(self._process.kill)

    def ask(self, *arguments: Any) -> None:
        """Asks for `work(*arguments)`."""
        with suppress(OSError):  # `answer` says that it has ended
            self._connection.send(arguments)

    def answer(self) -> Any:
        """The result of the oldest request without an answer. Raises UserError: the work did, or
        the process was ended from outside."""
        try:
            found, problem = self._connection.recv()
        except (EOFError, OSError):
            raise _ended() from None
        if problem is not None:
            raise problem
        return found


def _serve(work: bytes, path: list[str], connection: Connection) -> None:
    _start_worker(work, path)
    ignore_stop_signals()
    while True:
        try:
            arguments = connection.recv()
        except (EOFError, OSError):  # the rank has ended, perhaps with an answer unread
            return
        try:
            answer: tuple[Any, UserError | None] = (_work(*arguments), None)
        except UserError as error:
            answer = (None, error)
        try:
            connection.send(answer)
        except OSError:
            return


def _ended() -> UserError:
    return UserError(
        "dataset: a process that tokenizes was ended from outside (out of memory?); expected it to "
        "finish; dataset.processes=1 needs least memory"
    )


def _start_worker(work: bytes, path: list[str]) -> None:
    global _work
    import dill

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank hears it too, and ends this process
    quiet_torchao()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = path
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what runs side by side
    _work = dill.loads(work)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _nothing() -> None:
    """What a new process does first."""


def _call(start: int, stop: int) -> Any:
    return _work(start, stop)
