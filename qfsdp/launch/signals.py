"""Signals that ask a run to save and end.

The first one does; SIGTERM, SIGINT or SIGQUIT after another of these three ends the run at once.
The others may come again: the kernel repeats SIGXCPU, and Slurm sends SIGTERM after the SIGUSR1 of
`--signal`. One that was ignored when the process started, as `nohup` ignores SIGHUP, stays ignored.

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
from types import FrameType
from typing import Any

from qfsdp.common.errors import speaks_for_all
from qfsdp.common.long_waits import SLOW_S
from qfsdp.common.terminal import say

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# Of batch systems, a closed terminal, limits of processor time, timers and power supplies.
_OTHERS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGPWR")  # macOS has no SIGPWR
SIGNALS = (*ENDING, *(getattr(signal, name) for name in _OTHERS if hasattr(signal, name)))
# Batch systems signal every process of a job, and launchers pass the signal on too. A signal this
# soon after the first one belongs to the same request.
SAME_REQUEST_S = 1.0


def heard() -> list[signal.Signals]:
    """The signals that this process must listen to.

    SIGTERM and SIGINT are always among them: a shell without job control ignores SIGINT for what it
    starts with `&`, and whoever sends it to such a process means it.
    """
    always = (signal.SIGTERM, signal.SIGINT)
    return [n for n in SIGNALS if n in always or signal.getsignal(n) != signal.SIG_IGN]


def ignore_stop_signals() -> None:
    """For processes that help a rank: they must go on while it finishes a step and saves."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def to_number(stop: object) -> int:
    """A request to stop for an exchange between ranks: a signal's number, 0 for no request."""
    return int(stop) if isinstance(stop, signal.Signals) else 128 * bool(stop)


def who_asks(number: int) -> str:
    """The beginning of a line about the request `to_number` stands for: "SIGHUP: ", or ""."""
    return f"{signal.Signals(number).name}: " if number in SIGNALS else ""


class _Requests:
    """The signals that a process has received.

    Fields:
        received: the first one, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._ending_at: float | None = None  # when the first of `ENDING` came

    def ends_at_once(self, number: int) -> bool:
        """Notes a signal; whether the process must end now."""
        self.received = self.received or signal.Signals(number)
        if number not in ENDING:
            return False
        now = time.monotonic()
        self._ending_at = self._ending_at or now
        return now - self._ending_at > SAME_REQUEST_S


class StopRequest(_Requests):
    """Context manager that notes the first of `SIGNALS`, which `received` names.

    A second one of `ENDING` exits the process with the status 128 + its number. If the run has not
    ended `SLOW_S` after the first, rank 0 says what it waits for: a step may take minutes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[signal.Signals, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heard()}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        if self.ends_at_once(number):
            os._exit(128 + number)  # does not wait for writer threads and collectives
        if is_first and speaks_for_all():
            # A thread, because a handler may interrupt another line that is being printed.
            threading.Thread(target=self._tell, name="stop_request", daemon=True).start()

    def _tell(self) -> None:
        if not self._over.wait(SLOW_S):
            end = "saves and ends after this step; a second signal ends it at once"
            say(f"{self.received.name}: the run {end}")  # type: ignore[union-attr]

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Relay(_Requests):
    """Signal handler for torchrun's agent: passes signals on to its ranks, or ends all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: Any = None  # torchelastic's PContext
        self._numbers = heard()

    def started(self, ranks: Any) -> None:
        """Installs the handler; torchelastic has just installed its own, also for SIGHUP under
        `nohup`."""
        self._ranks = ranks
        for number in SIGNALS:
            signal.signal(number, self._forward if number in self._numbers else signal.SIG_IGN)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        ends = self.ends_at_once(number)
        for pid in self._ranks.pids().values():
            with suppress(ProcessLookupError):
                if not ends:
                    os.kill(pid, number)
                else:
                    # Python cannot handle a signal in a rank that waits inside a collective.
                    os.killpg(pid, signal.SIGKILL)  # every rank leads its own session
        if ends:
            self.received = signal.Signals(number)
            self.end()

    def end(self) -> None:
        """Ends the agent as torchelastic's own handler would."""
        from torch.distributed.elastic.multiprocessing.api import SignalException

        assert self.received is not None
        raise SignalException(f"stopped by {self.received.name}", self.received)


@contextmanager
def forwarded_to_ranks() -> Iterator[Relay]:
    """Makes agents that run inside pass `SIGNALS` on to their ranks."""
    from unittest.mock import patch

    from torch.distributed.elastic.multiprocessing.api import PContext

    relay, start = Relay(), PContext.start
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def start_ranks(ranks: PContext) -> None:
        if relay.received is not None:  # the signal came while failed ranks were replaced
            relay.end()
        start(ranks)
        relay.started(ranks)

    try:
        with patch.object(PContext, "start", start_ranks):
            yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
