"""An answer of the engine in OpenAI's forms: whole, and as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from qfsdp.evaluation.serving.engine import Piece, Request
from qfsdp.evaluation.serving.requests import ApiError, Asked, failed
from qfsdp.evaluation.serving.served import Served


class Answer:
    """The answer to one request, which is submitted to the engine at once.

    Args:
        prompt: token ids.
        chat: in the form of chat completions, else of completions.
        ended: called when the engine has nothing more to do for it. It is not called later because
            a client reads slowly.
    """

    def __init__(
        self, asked: Asked, prompt: list[int], chat: bool, served: Served, ended: Callable[[], None]
    ) -> None:
        self._usage_asked, self._chat, self._ended = asked.usage, chat, ended
        self._prompt, self._seconds = len(prompt), served.limits.seconds
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._request = Request(
            model=asked.model,
            prompt=prompt,
            sampling=asked.sampling,
            stops=asked.stops,
            tell=self._tell,
            deadline=time.monotonic() + self._seconds,
        )
        self._fields = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }
        served.engine.submit(self._request)

    def _tell(self, piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._take, piece)

    def _take(self, piece: Piece) -> None:
        self._pieces.put_nowait(piece)
        if piece.finish is not None:
            self._ended()

    async def _read(self) -> AsyncIterator[Piece]:
        """The pieces up to the last."""
        errors = {
            "timeout": ApiError(408, f"no answer within {self._seconds:g} s", None, "timeout"),
            "failed": failed(),
            "closing": ApiError(503, "the server is shutting down"),
        }
        finish: str | None = None
        while finish is None:
            piece = await self._pieces.get()
            finish = piece.finish
            if finish in errors:
                raise errors[finish]
            yield piece

    def give_up(self) -> None:
        """Frees the request's row, if it still has one."""
        self._request.cancelled.set()
        self._ended()

    async def whole(self, request: HttpRequest) -> dict[str, Any]:
        """The answer in one piece; given up when the client closes the connection.

        Raises:
            ApiError: there is no answer.
            ClientDisconnect: the client has gone.
        """

        async def read() -> list[Piece]:
            return [piece async for piece in self._read()]

        reading = asyncio.create_task(read())
        gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ClientDisconnect
            pieces = reading.result()
        finally:
            self.give_up()
            for task in (reading, gone):
                task.cancel()
        text = "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": pieces[-1].finish, "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        usage = self._usage(pieces[-1].tokens)
        return {**self._fields, "object": kind, "choices": [choice], "usage": usage}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        if self._chat:
            yield self._event({"role": "assistant", "content": ""}, None)
        tokens = 0
        try:
            async for piece in self._read():
                tokens = piece.tokens
                if piece.text:
                    yield self._event({"content": piece.text}, None)
                if piece.finish is not None:
                    yield self._event({}, piece.finish)
        except ApiError as error:
            yield _sse(error.body())
            return
        if self._usage_asked:
            yield _sse(self._chunk([]) | {"usage": self._usage(tokens)})
        yield "data: [DONE]\n\n"

    def _event(self, delta: dict[str, str], finish: str | None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return _sse(self._chunk([choice]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._fields, "object": kind, "choices": choices}

    def _usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": tokens,
            "total_tokens": self._prompt + tokens,
        }


def _sse(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
