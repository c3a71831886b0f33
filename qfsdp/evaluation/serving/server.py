"""The HTTP server of `qfsdp serve`: its socket, and uvicorn with limits for connections."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import logging
import math
import socket
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.common.files import allow_files

if TYPE_CHECKING:
    from qfsdp.evaluation.serving.api import Served

log = logging.getLogger("qfsdp")

GRACE_S = 5  # for running answers, after Ctrl-C or SIGTERM
CLOSING_S = 2  # more, to tell the clients of the others
MOST_CONNECTIONS = 2048
OTHER_FILES = 64  # that the process has open, or opens
ROUNDS_TO_BE_READ = 4
"""asyncio accepts connections in one round of its loop and reads from them two rounds later. Each
round accepts a quarter of the connections that there may be. So a request that was sent at once is
read before newer connections can take its place: of 24 requests beside 500 idle clients 20 had been
closed unread."""


def check_packages() -> None:
    """Raises UserError if a package of the server is missing."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"serve: {name} is not installed; expected `pip install {name}`")


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`; port 0 takes a free one. Raises UserError: the
    address is not this machine's, or the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
    except socket.gaierror as error:
        raise UserError(f"host: {host!r}: {error.strerror}; expected an address") from None
    except OSError as error:
        expected = "another port, or an address of this machine"
        raise UserError(f"port: {port} on {host}: {error.strerror}; expected {expected}") from None


def most_connections() -> int:
    """Connections at a time that this process may have; raises its limit of open files.

    asyncio accepts up to `backlog` connections before it tells of the first: half of the files.
    """
    return max((allow_files(2 * MOST_CONNECTIONS + OTHER_FILES) - OTHER_FILES) // 2, 8)


def run_server(served: Served, listening: socket.socket) -> None:
    """Answers requests until SIGINT or SIGTERM; the signal then ends the process."""
    import uvicorn

    from qfsdp.evaluation.serving.api import Api
    from qfsdp.evaluation.serving.connections import limited

    api, seconds, most = Api(served), served.limits.client_seconds, most_connections()
    at_once = max(1, most // ROUNDS_TO_BE_READ)
    config = uvicorn.Config(
        api,
        http=limited(seconds, most),
        loop="asyncio",
        log_level="error",  # what a client does wrong is told to the client
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=at_once,
        timeout_keep_alive=math.ceil(seconds),
        timeout_graceful_shutdown=GRACE_S + CLOSING_S,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().set_exception_handler(_told)
            await super().startup(sockets)
            listening.listen(MOST_CONNECTIONS)  # uvicorn has made it as short as `at_once`

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            api.closing = True
            loop = asyncio.get_running_loop()
            loop.call_later(GRACE_S, served.engine.stop)
            loop.call_later(GRACE_S + CLOSING_S / 2, self._hang_up)
            await super().shutdown(sockets)

        def _hang_up(self) -> None:
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    served.engine.start()
    Server(config).run(sockets=[listening])


def _told(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """One line, instead of a traceback, where the system has no files left: asyncio accepts no
    connection for a second, and goes on."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):
        log.warning("serve: %s: new connections wait", error.strerror)
    else:
        loop.default_exception_handler(context)
