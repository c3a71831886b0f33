"""Connections that do not last forever: uvicorn's, with limits of time and number.

uvicorn has a limit for idle connections only. A client could keep a connection by sending a byte
now and then, or by not reading, and one whose request is no HTTP got plain text.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qfsdp.evaluation.serving.requests import ApiError

LOOKS = 8  # at a connection, in the time of its limit


class Connection(H11Protocol):
    """A connection; its class attributes are set by `limited`."""

    seconds = 20.0
    most = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._received = False  # anything since the last request
        self._sent_at = self._since = self.loop.time()
        self._phase: Any = None
        self._timer = self.loop.call_later(self.seconds / LOOKS, self._look)
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for a request, this one at the worst."""
        waiting: list[Any] = [other for other in self.connections if other.waits]  # type: ignore
        oldest = min(waiting, key=lambda other: other._since)
        if oldest is self:
            self.answer(429, f"{self.most} requests are under way; try again later")
        else:
            oldest.transport.abort()

    @property
    def waits(self) -> bool:
        """Whether no request is under way."""
        return self.conn.their_state is h11.IDLE and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        self._received = True
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._received = False
        super().on_response_complete()

    def _look(self) -> None:
        """Ends the connection if the client has taken too long."""
        self._timer = self.loop.call_later(self.seconds / LOOKS, self._look)
        now = self.loop.time()
        if not self.transport.get_write_buffer_size():
            self._sent_at = now
        elif now - self._sent_at > self.seconds:  # the client does not read
            self.transport.abort()
            return
        answered = self.cycle is None or self.cycle.response_complete
        phase = (self.cycle, answered, self.conn.their_state)
        if phase != self._phase:
            self._phase, self._since = phase, now
        elif answered and now - self._since > self.seconds and not self.transport.is_closing():
            if self.waits and self._received:
                self.answer(408, f"no whole request within {self.seconds:g} s")
            else:  # idle, or still sending a body whose request has been refused
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP. uvicorn calls it while it handles h11's error."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.answer(status, f"no HTTP request: {error}")

    def answer(self, status: int, message: str) -> None:
        """Answers without the application, if it has not begun to, and closes the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(status, message).body()).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            headers |= {"connection": "close"} | ({"retry-after": "1"} if status == 429 else {})
            response = h11.Response(status_code=status, headers=list(headers.items()), reason=b"")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def limited(seconds: float, most: int) -> type[Connection]:
    """Connections of a server.

    Args:
        seconds: for a client to send a request's headers, or to take what has been sent.
        most: connections at a time; for one more, the one that has been idle longest is closed.
    """
    return type("LimitedConnection", (Connection,), {"seconds": seconds, "most": most})
