"""Ends a run that hangs, and says which rank it waited for.

A thread in every rank tells the others at each look what its rank does: step, phase, seconds
without moving on, number of collectives called. The values lie in a store that torchrun's agent
hosts, so that any rank may stop. A rank has passed its limit (`DistributedConfig`) if it has not
moved on for so long (`qfsdp.common.progress`), or if its thread has said nothing new for `timeout`:
a stopped process. When every rank has passed its limit, the run hangs. As long as one rank moves
on, the others wait for it, however long it takes.

Then every rank writes its Python stacks to <output_dir>/hangs, the lowest one says which ranks did
not arrive, and all end with `HANG_STATUS`. A rank did not arrive if its thread is silent; if none
is, those that have called fewer collectives than others.

Time is counted in looks, so a whole run that was suspended goes on without an alarm. Every 5 s one
look takes 0.1 ms on three ranks, 3 ms on 512. Training neither waits for it nor exchanges anything.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from qfsdp.common.errors import InvalidField
from qfsdp.common.long_waits import LONGEST_SILENCE_S, where
from qfsdp.common.progress import NOW
from qfsdp.common.sizes import format_duration, parse_duration
from qfsdp.common.terminal import say

HANG_STATUS = 75  # EX_TEMPFAIL: starting the run again may help
STORE = "QFSDP_STORE"  # "host:port" of a store that outlives every rank; set by our agent
AGENT = "QFSDP_AGENT"  # the process number of our agent, which sets it
FOLDER = "hangs"
LONGEST_LOOK_S = 5.0
LAST_WORDS_S = 5.0  # for the ranks' stacks, and for the one rank that reports


@dataclass
class DistributedConfig:
    """Section `distributed`: when a run counts as hung.

    Fields:
        timeout: a run in which no rank has moved on for this long is ended. A rank moves on with
            every phase and layer of a step, and with every batch, tensor or token of longer work.
        first_timeout: takes the place of `timeout` while a phase runs for the first time, which
            may load or compile. If it is shorter than `timeout`, `timeout` counts.
    """

    timeout: str | float = "10min"
    first_timeout: str | float = "30min"

    def check(self) -> None:
        for name in ("timeout", "first_timeout"):
            try:
                parse_duration(getattr(self, name))
            except ValueError:
                expected = "a duration such as 20s, 10min, 2h or a number of seconds"
                raise InvalidField(name, getattr(self, name), expected) from None

    @property
    def seconds(self) -> float:
        return parse_duration(self.timeout)

    @property
    def first_seconds(self) -> float:
        return max(self.seconds, parse_duration(self.first_timeout))

    @property
    def for_collectives(self) -> timedelta:
        """The limit of one collective. Twice the watchdog's, which knows more and comes first."""
        return timedelta(seconds=2 * self.first_seconds)


@dataclass
class Look:
    """What one rank says about itself at one look.

    Fields:
        number: of the look, so that two are never equal.
        quiet: seconds since the rank has moved on.
        limit: the seconds it may be quiet.
        calls: collectives called so far, by process group.
        where: the innermost Python frame, once the rank takes the run for hung; else empty.
    """

    number: int
    quiet: float
    limit: float
    step: int
    phase: str
    calls: dict[str, int]
    where: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


class Watchdog(threading.Thread):
    """The thread of one rank. Between `start` and `stop` it may end the process.

    Args:
        folder: for the stacks, or None.
        rank, size: of this process, and the number of ranks.
    """

    def __init__(
        self, config: DistributedConfig, folder: Path | None, rank: int = 0, size: int = 1
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._config, self._folder, self._rank, self._size = config, folder, rank, size
        self._period = min(LONGEST_LOOK_S, config.seconds / 20)
        self._over = threading.Event()
        self._store: Any = None
        self._parent = os.getppid() if "LOCAL_RANK" in os.environ else None
        self._moves, self._quiet, self._number = NOW.moves, 0.0, 0
        self._doing, self._since, self._told = (0, ""), 0.0, 0.0
        # Of the other ranks: the last words, and the seconds since they were new.
        self.texts: dict[int, bytes] = {}
        self.silent_seconds = {other: 0.0 for other in range(size) if other != rank}

    def stop(self) -> None:
        """Ends the thread. It must not be in the store's code when the interpreter goes down."""
        self._over.set()
        self.join(timeout=2 * LONGEST_LOOK_S)

    def run(self) -> None:
        before = time.monotonic()
        self._follow_agent()  # at once: without an agent, ranks wait an hour for each other
        self.look(0.0)  # at once: a rank that has never spoken gets the longest limit
        while not self._over.wait(self._period):
            now = time.monotonic()
            # A look that comes late was suspended, or starved by other processes.
            elapsed, before = min(now - before, 2 * self._period), now
            self._follow_agent()
            looks = self.look(elapsed)
            self.tell(elapsed)
            if self.is_hung(looks) and not self._over.is_set():
                self._end()

    def _follow_agent(self) -> None:
        """Asks this rank to save and end if its agent is gone, which nobody else would do."""
        if self._parent is None:
            return
        agent = int(os.environ.get(AGENT, self._parent))  # may have gone before this rank looked
        if os.getppid() != self._parent or not _exists(agent):
            self._parent = None
            with suppress(OSError):  # whoever read the output may be gone too
                say(f"rank {self._rank}: torchrun's agent is gone; this rank saves and ends")
            os.kill(os.getpid(), signal.SIGTERM)

    def tell(self, elapsed: float) -> None:
        """Says every minute what a long step does; `StepClock` tells the first time of a phase."""
        self._since += elapsed
        if self._doing != (NOW.step, NOW.phase):
            self._doing, self._since, self._told = (NOW.step, NOW.phase), 0.0, 0.0
        known = NOW.step > 0 and NOW.phase in NOW.ended
        if self._rank == 0 and known and self._since - self._told >= LONGEST_SILENCE_S:
            self._told = self._since
            say(f"step {NOW.step}: {NOW.phase} ... {self._since:.0f} s{where()}")

    # ---- what the ranks say ----------------------------------------------------------------

    def look(self, elapsed: float, where: str = "") -> dict[int, Look]:
        """Tells the other ranks about this one; returns what each has said last."""
        self._quiet = 0.0 if NOW.moves != self._moves else self._quiet + elapsed
        self._moves = NOW.moves
        self._number += 1
        first = NOW.phase.removeprefix("after ") not in NOW.ended
        limit = self._config.first_seconds if first else self._config.seconds
        mine = Look(self._number, self._quiet, limit, NOW.step, NOW.phase, calls(), where)
        for other in self.silent_seconds:
            self.silent_seconds[other] += elapsed
        # Without an answer of the store the other ranks are silent.
        with suppress(RuntimeError, OSError):  # torch's DistError is a RuntimeError
            self._exchange(json.dumps(asdict(mine)))
        looks = {rank: Look(**json.loads(text)) for rank, text in self.texts.items()}
        return looks | {self._rank: mine}

    def _exchange(self, mine: str) -> None:
        if self._size == 1 or (self._store is None and not self._connect()):
            return
        self._store.set(str(self._rank), mine)
        known = [r for r in self.silent_seconds if r in self.texts or self._store.check([str(r)])]
        texts = self._store.multi_get([str(r) for r in known]) if known else []
        for rank, text in zip(known, texts, strict=True):
            if text != self.texts.get(rank):
                self.texts[rank], self.silent_seconds[rank] = text, 0.0

    def _connect(self) -> bool:
        address = store_address()
        if address is None:
            return False
        from torch.distributed import PrefixStore, TCPStore

        host, _, port = address.rpartition(":")
        seconds = timedelta(seconds=max(1.0, self._period))
        store = TCPStore(host, int(port), timeout=seconds, wait_for_workers=False)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("MASTER_PORT")
        self._store = PrefixStore(f"watchdog/{start}", store)
        return True

    # ---- whether the run hangs, and whom it waits for --------------------------------------

    def is_hung(self, looks: dict[int, Look]) -> bool:
        mine = looks[self._rank]
        if any(look.where for look in looks.values()):
            return True  # another rank has seen it
        return mine.quiet >= mine.limit and all(
            self._has_passed(looks.get(rank), silent)
            for rank, silent in self.silent_seconds.items()
        )

    def _has_passed(self, look: Look | None, silent: float) -> bool:
        """Whether a rank has passed its limit that said `look` so many seconds ago."""
        if look is None:
            return silent >= self._config.first_seconds
        # Work that runs for the first time is slow, but its thread speaks. A rank that is stopped
        # within one look of its first steps must not get the longer limit.
        return silent >= self._config.seconds or silent + look.quiet >= look.limit

    def _is_silent(self, rank: int, looks: dict[int, Look]) -> bool:
        return rank not in looks or self.silent_seconds.get(rank, 0.0) > self._config.seconds / 2

    def _end(self) -> None:
        """Writes the stacks, reports, and ends this process."""
        self._write_stacks()
        where = innermost_frame()
        until = time.monotonic() + LAST_WORDS_S
        while True:
            looks = self.look(0.0, where)
            answering = [rank for rank in looks if not self._is_silent(rank, looks)]
            if all(looks[rank].where for rank in answering) or time.monotonic() > until:
                break
            time.sleep(0.05)
        if self._rank == min(answering):
            print("\n".join(self.report(looks)), file=sys.stderr, flush=True)
        else:
            # The first rank that ends makes the agent end the others.
            time.sleep(LAST_WORDS_S)
        os._exit(HANG_STATUS)

    def _write_stacks(self) -> None:
        if self._folder is None:
            return
        with suppress(OSError):  # a full disk
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"rank_{self._rank}.txt", "w") as file:
                print(f"step {NOW.step}, {NOW.phase}; process {os.getpid()}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

    def report(self, looks: dict[int, Look]) -> list[str]:
        """The lines for the user."""
        missing = absent(looks, [r for r in range(self._size) if self._is_silent(r, looks)])
        mine = looks[self._rank]
        key = "timeout" if mine.limit == self._config.seconds else "first_timeout"
        lines = [
            f"error: the run hangs in step {mine.step}: no rank has moved on for "
            f"{format_duration(mine.limit)} (distributed.{key})"
        ]
        for rank in missing:
            if (look := looks.get(rank)) is None:
                lines.append(f"  rank {rank} did not arrive: nothing was heard from it")
                continue
            place = f"in step {look.step}, {look.phase}; host {look.host}, process {look.pid}"
            if not look.where:
                place = f"last seen {place}"
            doing = look.where or f"its process does not answer{_state(look)}"
            lines.append(f"  rank {rank} did not arrive: {place}; {doing}")
        waiting: dict[str, list[str]] = {}
        for rank in sorted(set(looks) - set(missing)):
            at = f"step {looks[rank].step}, {looks[rank].phase}"
            waiting.setdefault(at, []).append(str(rank))
        lines += [f"  waiting in {at}: ranks {', '.join(of)}" for at, of in waiting.items()]
        if not missing:
            lines.append("  all ranks have called the same collectives: a device or the network")
        if self._folder is not None:
            lines.append(f"  Python stacks: {self._folder}/rank_*.txt")
        lines.append(
            f"  ending with status {HANG_STATUS}; with torchrun's --max-restarts the run starts "
            "again, and resume=auto continues it"
        )
        return lines


def absent(looks: dict[int, Look], silent: list[int]) -> list[int]:
    """The ranks that a hung run waits for: the silent ones, or those behind in collectives. A
    single process waits for itself."""
    if silent or len(looks) == 1:
        return silent or list(looks)
    most: dict[str, int] = {}
    for look in looks.values():
        for group, count in look.calls.items():
            most[group] = max(count, most.get(group, 0))
    return [
        rank
        for rank, look in sorted(looks.items())
        if any(count < most[group] for group, count in look.calls.items())
    ]


def calls() -> dict[str, int]:
    """The number of collectives that this process has called, by name of the process group."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return {}
    counts = {}
    world = distributed._world
    for group in list(world.pg_map):
        with suppress(RuntimeError, KeyError):  # a backend that does not count
            counts[world.pg_names[group]] = int(group._get_sequence_number_for_group())
    return counts


def innermost_frame() -> str:
    """File, line and function in which the main thread is."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    stack = traceback.extract_stack(frame) if frame is not None else []
    if not stack:
        return "in no Python code"
    return f"in {stack[-1].name}, {stack[-1].filename}:{stack[-1].lineno}"


def store_address() -> str | None:
    """ "host:port" of a store that an agent hosts, or None."""
    if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        return None
    if STORE in os.environ:
        return os.environ[STORE]
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":
        return None  # rank 0 hosts the only store
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return True


def _state(look: Look) -> str:
    """What the system says about a process of this machine, such as "T (stopped)"."""
    if look.host != socket.gethostname():
        return ""
    with suppress(OSError):
        for line in Path(f"/proc/{look.pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return f"; the system calls it {line.removeprefix('State:').strip()}"
        return ""
    return "; the system has no such process"


@contextmanager
def watched(config: Any) -> Iterator[None]:
    """Watches a recipe's `main` within a `with` block.

    Args:
        config: the recipe's; its section `distributed` if it has one. Other recipes are watched
            with the defaults where there are several ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    section = getattr(config, "distributed", None)
    if section is None and size == 1:
        yield
        return
    output_dir = getattr(config, "output_dir", None)
    folder = Path(output_dir).expanduser() / FOLDER if output_dir else None
    watchdog = Watchdog(
        section or DistributedConfig(), folder, int(os.environ.get("RANK", 0)), size
    )
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
