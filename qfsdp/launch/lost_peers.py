"""When a rank is gone, collectives fail on the others: these end without a traceback of 37 lines.

The rank that is gone says why, or the agent does (`qfsdp.launch.agent`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOST_PEER_STATUS = 76  # exit status; starting the run again may help

# gloo's words, those of TCPStore, and those of NCCL.
_GONE = (
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
    r"Timed out waiting \d+ms|Application timeout caused pair closure|"
    r"failed to recv, got 0 bytes|remote process exited|NCCL communicator was aborted"
)


@contextmanager
def lost_peers() -> Iterator[None]:
    """Turns the error of a collective without its peers into exit status `LOST_PEER_STATUS`."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        several = "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
        if not several or not _is_lost_peer(error):
            raise
        sys.stdout.flush()
        # "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4. This is ..."
        _tell(re.sub(r"^\[\S+\] ", "", str(error)).strip().partition(". ")[0])
        # A normal exit can abort in gloo's threads, see `ranks.leave_process_group`.
        os._exit(LOST_PEER_STATUS)


def _is_lost_peer(error: RuntimeError) -> bool:
    from torch.distributed import DistError

    plain = type(error) is RuntimeError or isinstance(error, DistError)
    return plain and re.search(_GONE, str(error)) is not None


def _tell(reason: str) -> None:
    """Writes the reason to the file that torchrun's agent reads after a failure; a rank without an
    agent prints it."""
    extra = {"py_callstack": reason, "timestamp": str(int(time.time()))}
    text = json.dumps({"message": {"message": reason, "extraInfo": extra}})
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        with suppress(OSError):
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(text)
    elif "TORCHELASTIC_RUN_ID" not in os.environ:
        rank = os.environ.get("RANK", "0")
        print(f"error: rank {rank} has lost another rank: {reason}", file=sys.stderr, flush=True)
