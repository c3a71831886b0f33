"""OpenAI's HTTP API over an `Engine`: models, chat completions and completions, with streaming.

A stream has server-sent events: `data: {...}` for each piece of text, and `data: [DONE]`. An error
is `{"error": {"message", "type", "param", "code"}}`, in a stream too.

Web pages must not reach a server of this machine through the user's browser. So a request needs
`Content-Type: application/json`, which a page may not send to another origin unasked, and no
answer permits another origin. On a loopback address the header `Host` must name this machine: that
stops a page whose name has been pointed at 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qfsdp.cli.errors import UserError
from qfsdp.cli.sizes import parse_size
from qfsdp.data.token_ids import check_ids
from qfsdp.evaluation.prompts import prompt_tokens
from qfsdp.evaluation.serving.engine import Busy, Piece, Request
from qfsdp.evaluation.serving.requests import ApiError, Asked, parse
from qfsdp.evaluation.serving.served import Served, is_loopback

log = logging.getLogger("qfsdp")

CLIENT_GONE = 499  # nobody reads this status
FAILED = ApiError(500, "the server failed; its log says why", None, "failed")


class Api:
    """The handlers of one server's routes."""

    def __init__(self, served: Served) -> None:
        self._served, self._started = served, int(time.time())
        # The process that renders chat templates answers one question at a time.
        self._tokenizing = asyncio.Lock()

    def app(self) -> Starlette:
        """The ASGI application."""
        posts: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
            "/v1/chat/completions": lambda request: self._complete(request, chat=True),
            "/v1/completions": lambda request: self._complete(request, chat=False),
        }
        routes = [Route(path, self._checked(go), methods=["POST"]) for path, go in posts.items()]
        for path in ("/v1/models", "/v1/models/{name:path}"):
            routes.append(Route(path, self._checked(self._list), methods=["GET"]))
        return Starlette(routes=routes, exception_handlers={HTTPException: _as_openai_says})

    def _checked(
        self, handler: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """The handler, behind the checks of host and key; errors become answers."""

        async def handle(request: HttpRequest) -> Response:
            try:
                self._check_caller(request)
                return await handler(request)
            except ApiError as error:
                return _error(error)
            except Exception:
                log.exception("serve: %s failed", request.url.path)
                return _error(FAILED)

        return handle

    def _check_caller(self, request: HttpRequest) -> None:
        if is_loopback(self._served.host) and not is_loopback(request.url.hostname or ""):
            raise ApiError(403, f"host: {request.url.hostname!r}; expected localhost or 127.0.0.1")
        if self._served.api_key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not secrets.compare_digest(given.encode(), self._served.api_key.encode()):
                raise ApiError(401, "the API key is missing or wrong", None, "invalid_api_key")

    async def _list(self, request: HttpRequest) -> Response:
        fields = {"object": "model", "created": self._started, "owned_by": "qfsdp"}
        found = {name: {"id": name, **fields} for name in self._served.models}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": list(found.values())})
        if name not in found:
            raise ApiError(404, f"model: {name!r} does not exist", "model", "model_not_found")
        return JSONResponse(found[name])

    async def _complete(self, request: HttpRequest, chat: bool) -> Response:
        served = self._served
        body = await _body(request, parse_size(served.limits.body), served.limits.seconds)
        asked = parse(body, chat, list(served.models), served.usual, served.limits)
        prompt = await self._tokens(asked, chat)
        answer = Answer(self._with_room(asked, len(prompt)), prompt, chat, served)
        if asked.stream:
            return EventStream(answer)
        return JSONResponse(await answer.whole(request))

    async def _tokens(self, asked: Asked, chat: bool) -> list[int]:
        served, name = self._served, "messages" if chat else "prompt"
        model = served.models[asked.model]
        try:
            if isinstance(asked.prompt, list) and not chat:
                tokens: list[int] = asked.prompt  # type: ignore[assignment]
            else:
                async with self._tokenizing:
                    given: Any = (model.tokenizer, asked.prompt, chat, None)
                    tokens = await asyncio.to_thread(prompt_tokens, *given)
            check_ids(name, tokens, model.decoder.config.vocab_size)
        except UserError as error:
            raise ApiError(400, f"{name}: {error}", name, "invalid_value") from None
        most = min(served.limits.prompt_tokens, served.positions - 1)
        if not 1 <= len(tokens) <= most:
            message = f"{name}: {len(tokens)} tokens; expected 1 to {most}"
            raise ApiError(400, message, name, "context_length_exceeded")
        return tokens

    def _with_room(self, asked: Asked, prompt: int) -> Asked:
        """The request with a length that the model's positions allow."""
        room, new = self._served.positions - prompt, asked.sampling.max_new_tokens
        if new <= room:
            return asked
        if asked.limited:
            message = f"max_tokens: {new} after {prompt} tokens of the prompt; expected at most "
            message += f"the model's {self._served.positions} positions together"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        return replace(asked, sampling=replace(asked.sampling, max_new_tokens=room))


class Answer:
    """The answer to one request, submitted to the engine when it is first read.

    Args:
        prompt: token ids.
        chat: in the form of chat completions, else of completions.
    """

    def __init__(self, asked: Asked, prompt: list[int], chat: bool, served: Served) -> None:
        self._asked, self._prompt, self._chat, self._served = asked, prompt, chat, served
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._request = Request(
            model=asked.model,
            prompt=prompt,
            sampling=asked.sampling,
            stops=asked.stops,
            tell=self._tell,
            deadline=time.monotonic() + served.limits.seconds,
        )
        prefix = "chatcmpl" if chat else "cmpl"
        self._fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }
        try:
            served.engine.submit(self._request)
        except Busy:
            message = f"{served.limits.waiting} requests wait already; try again later"
            raise ApiError(429, message, None, "rate_limit_exceeded") from None

    def _tell(self, piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _read(self) -> AsyncIterator[Piece]:
        """The pieces up to the last."""
        finish = None
        while finish is None:
            piece = await self._pieces.get()
            finish = piece.finish
            if finish == "timeout":
                seconds = self._served.limits.seconds
                raise ApiError(408, f"no answer within {seconds:g} s", None, "timeout")
            if finish == "failed":
                raise FAILED
            yield piece

    def give_up(self) -> None:
        """Frees the request's row, if it still has one."""
        self._request.cancelled.set()

    async def whole(self, request: HttpRequest) -> dict[str, Any]:
        """The answer in one piece; given up when the client closes the connection."""

        async def read() -> list[Piece]:
            return [piece async for piece in self._read()]

        reading = asyncio.create_task(read())
        gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ApiError(CLIENT_GONE, "the client has closed the connection")
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
        if self._asked.usage:
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
        prompt = len(self._prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }


class EventStream(StreamingResponse):
    """The events of an answer, which is given up when the client closes the connection."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.give_up()


async def _body(request: HttpRequest, most: int, seconds: float) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "content-type: expected application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise ApiError(413, f"the body has more than {most:,} bytes")
    except TimeoutError:
        raise ApiError(408, f"no whole request within {seconds:g} s", None, "timeout") from None
    return bytes(body)


def _sse(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


def _error(error: ApiError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


async def _as_openai_says(request: HttpRequest, error: Exception) -> Response:
    """Answers of starlette itself: an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _error(ApiError(error.status_code, message))
