"""SIGTERM and SIGINT: the first makes a run save and end, the second ends it at once.

Ranks use `StopRequest`. torchrun's agent, which starts them, would kill them 30 s after a signal
and exit with an error. Inside `forwarded_to_ranks` it passes the signal on and waits, so a run that
saves and ends exits with status 0.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Batch systems signal every process of a job, and launchers pass the signal on too. A signal this
# soon after the first one belongs to the same request.
SAME_REQUEST_S = 1.0


class StopRequest:
    """Context manager that notes the first SIGTERM or SIGINT; the second exits the process.

    Fields:
        received: the first signal, or None. The exit status is 128 + the second one's number.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._at = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._at > SAME_REQUEST_S:
            os._exit(128 + number)  # does not wait for writer threads and collectives

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Relay:
    """Signal handler for torchrun's agent: passes the first signal on, ends all on the second.

    Fields:
        received: the last SIGTERM or SIGINT, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0
        self._ranks: Any = None  # torchelastic's PContext

    def started(self, ranks: Any) -> None:
        """Installs the handler; torchelastic has just installed its own."""
        self._ranks = ranks
        for number in SIGNALS:
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._at = signal.Signals(number), time.monotonic()
            for pid in self._ranks.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif time.monotonic() - self._at > SAME_REQUEST_S:
            self.received = signal.Signals(number)
            # Python cannot handle a signal in a rank that waits inside a collective, so SIGKILL.
            for pid in self._ranks.pids().values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # every rank leads its own session
            self.end()

    def end(self) -> None:
        """Ends the agent as torchelastic's own handler would."""
        from torch.distributed.elastic.multiprocessing.api import SignalException

        assert self.received is not None
        raise SignalException(f"stopped by {self.received.name}", self.received)


@contextmanager
def forwarded_to_ranks() -> Iterator[Relay]:
    """Makes agents that run inside pass SIGTERM and SIGINT on to their ranks."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    relay, start = Relay(), PContext.start
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def start_ranks(ranks: PContext) -> None:
        if relay.received is not None:  # the signal came while failed ranks were replaced
            relay.end()
        start(ranks)
        relay.started(ranks)

    PContext.start = start_ranks  # type: ignore[method-assign, assignment]
    try:
        yield relay
    finally:
        PContext.start = start  # type: ignore[method-assign]
        for number, handler in before.items():
            signal.signal(number, handler)
