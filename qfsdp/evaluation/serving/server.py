"""The HTTP server of `qfsdp serve`: its socket, and uvicorn with limits for connections."""

from __future__ import annotations

import importlib.util
import socket
from typing import TYPE_CHECKING

from qfsdp.cli.errors import UserError

if TYPE_CHECKING:
    from qfsdp.evaluation.serving.api import Served

SPARE_CONNECTIONS = 32  # beyond those of running and waiting requests: models, refusals
GRACE_S = 5  # for running answers, after Ctrl-C or SIGTERM


def check_packages() -> None:
    """Raises UserError if a package of the server is missing."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"serve: {name} is not installed; expected `pip install qfsdp[serve]`")


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`; port 0 takes a free one.

    Raises:
        UserError: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except socket.gaierror as error:
        raise UserError(f"host: {host!r}: {error.strerror}; expected an address") from None
    except OSError as error:
        expected = "another port, or an address of this machine"
        raise UserError(f"port: {port} on {host}: {error.strerror}; expected {expected}") from None


def run_server(served: Served, listening: socket.socket) -> None:
    """Answers requests until SIGINT or SIGTERM; the signal then ends the process."""
    import uvicorn

    from qfsdp.evaluation.serving.api import Api

    limits = served.limits
    config = uvicorn.Config(
        Api(served).app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=limits.running + limits.waiting + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S,
    )
    served.engine.start()
    uvicorn.Server(config).run(sockets=[listening])
