"""torchrun's agent, which starts and watches the ranks of one machine, with four changes.

* A killed rank is named in one line. The failures of other ranks that follow from it are left out.
* A user's mistake ends the run. Starting again would repeat it.
* Ranks that are left after a failure get `GRACE_S` seconds to end, not 30: one of them may be
  stopped, and the others wait for it.
* When a machine joins, the ranks save before all start again, and have `SAVE_S` seconds for it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch.distributed.launcher.api as launcher
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from qfsdp.common.errors import USER_ERROR_STATUS, UserError
from qfsdp.common.long_waits import long_wait
from qfsdp.common.terminal import say
from qfsdp.launch.lost_peers import LOST_PEER_STATUS
from qfsdp.launch.watchdog import AGENT, STORE

GRACE_S = 5
SAVE_S = 300


class Agent(LocalElasticAgent):
    """The agent of one machine; torchrun's launcher makes one inside `our_agent`."""

    _grace = GRACE_S
    _ended_by_agent: frozenset[int] = frozenset()  # local ranks

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            with long_wait("waiting for the other machines"):
                super()._rendezvous(worker_group)
        except DistStoreError as error:  # of node 0: "Timed out after ... 1/2 clients joined"
            reason = str(error).splitlines()[0]
            raise UserError(
                f"--nnodes: not all machines have come ({reason}); expected the same command with "
                "another --node_rank on each"
            ) from None

    def _start_workers(self, group: WorkerGroup) -> dict[int, Any]:
        if (address := _address(group.store)) is not None:
            os.environ[STORE] = address
        os.environ[AGENT] = str(os.getpid())
        pids = super()._start_workers(group)
        self._ended_by_agent = frozenset()
        ranks: Any = self._pcontext
        close = ranks.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            handlers = ranks.subprocess_handlers
            alive = [at for at, handler in handlers.items() if handler.proc.poll() is None]
            since = time.monotonic()
            close(death_sig, self._grace)
            killed = time.monotonic() - since >= self._grace
            ours = {-signal.SIGTERM} | ({-signal.SIGKILL} if killed else set())
            ended = {at for at in alive if handlers[at].proc.poll() in ours}
            self._ended_by_agent |= ended

        ranks.close = close_soon
        return pids

    def _monitor_workers(self, group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(group)
        if result.state == WorkerState.SUCCEEDED and self._rdzv_handler.num_nodes_waiting() > 0:
            # The agent of another machine has seen the new one first, and all ranks have saved.
            return RunResult(state=WorkerState.HEALTHY)
        if result.is_failed():
            result.failures = self._causes(result.failures)
            status = {failure.exitcode for failure in result.failures.values()}
            if USER_ERROR_STATUS in status:
                self._remaining_restarts = 0
            else:
                _tell(result.failures)
            if self._remaining_restarts > 0:
                most = group.spec.max_restarts
                number = most - self._remaining_restarts + 1
                say(f"starting all ranks again ({number} of --max-restarts {most})")
        return result

    def _stop_workers(self, group: WorkerGroup) -> None:
        if group.state == WorkerState.HEALTHY:  # nothing failed: the number of machines changes
            say("the number of machines changes: the ranks save and start again")
            self._grace = SAVE_S
        try:
            super()._stop_workers(group)
        finally:
            self._grace = GRACE_S

    def _causes(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """The failures that follow from no other one; all if there is none."""
        own = {r: f for r, f in failures.items() if f.local_rank not in self._ended_by_agent}
        causes = {r: f for r, f in own.items() if f.exitcode != LOST_PEER_STATUS}
        return causes or own or failures


def _tell(failures: dict[int, ProcessFailure]) -> None:
    """One line for every killed rank, and one for all that have lost a rank elsewhere."""
    host = socket.gethostname()
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0:
            hint = ""
            if failure.exitcode == -signal.SIGKILL:
                hint = "; often the kernel's out-of-memory killer: see dmesg"
            name = failure.signal_name()
            say(f"error: rank {rank} on {host} (process {failure.pid}) was killed by {name}{hint}")
    lost = [rank for rank, f in sorted(failures.items()) if f.exitcode == LOST_PEER_STATUS]
    if lost:
        reason = failures[lost[0]].message
        reason = reason.get("message", "") if isinstance(reason, dict) else ""
        say(f"error: lost another rank: {reason} (ranks {', '.join(map(str, lost))} on {host})")


def _address(store: Any) -> str | None:
    """ "host:port" of the store of the agents; None for a store in a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else None


def our_agent() -> AbstractContextManager[Any]:
    """Makes torchrun's launcher use `Agent` within a `with` block."""
    return patch.object(launcher, "LocalElasticAgent", Agent)
