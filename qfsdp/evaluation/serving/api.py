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
import logging
import re
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from qfsdp.common.errors import UserError
from qfsdp.common.sizes import parse_size
from qfsdp.data.chat.special_tokens import texts_of
from qfsdp.data.token_ids import check_ids
from qfsdp.evaluation.generation import positions_of
from qfsdp.evaluation.prompts import prompt_tokens
from qfsdp.evaluation.serving.answers import Answer
from qfsdp.evaluation.serving.requests import ApiError, Asked, failed, parse
from qfsdp.evaluation.serving.served import Served, is_loopback

log = logging.getLogger("qfsdp")

HEADERS = 2**15  # bytes; h11 has a limit for those that come in parts
LONG = 2**15  # characters; a longer prompt is tokenized alone, others pass it
POSTS = {"/v1/chat/completions": True, "/v1/completions": False}  # whether it is a chat
MODELS = "/v1/models"


class Api:
    """The ASGI application."""

    def __init__(self, served: Served) -> None:
        self._served, self._started = served, int(time.time())
        self._places: set[object] = set()  # from a prompt's tokenizing to its answer's last token
        self._long = asyncio.Lock()
        self.closing = False  # new requests are refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = HttpRequest(scope, receive)
        try:
            self._check_caller(request)
            response = await self._response(request)
        except ClientDisconnect:
            return
        except ApiError as error:
            response = _refusal(error)
        except Exception:
            log.exception("serve: %s failed", request.url.path)
            response = _refusal(failed())
        await response(scope, receive, send)

    def _check_caller(self, request: HttpRequest) -> None:
        if sum(len(name) + len(value) for name, value in request.headers.raw) > HEADERS:
            raise ApiError(431, f"the headers have more than {HEADERS:,} bytes")
        host = request.headers.get("host")
        if is_loopback(self._served.host) and host is not None and not _is_own(host):
            raise ApiError(403, f"host: {host!r:.80}; expected localhost or 127.0.0.1")
        if self._served.api_key is not None:
            given = re.sub(r"(?i)^bearer +", "", request.headers.get("authorization", ""))
            if not secrets.compare_digest(given.encode(), self._served.api_key.encode()):
                raise ApiError(401, "the API key is missing or wrong", None, "invalid_api_key")
        if self.closing:
            raise ApiError(503, "the server is shutting down")

    async def _response(self, request: HttpRequest) -> Response:
        path = request.scope["path"]
        listed = path == MODELS or path.startswith(f"{MODELS}/")
        allowed = ["POST"] if path in POSTS else ["GET", "HEAD"] if listed else []
        if not allowed:
            raise ApiError(404, f"{request.method} {path!r:.80}: Not Found")
        if request.method not in allowed:
            error = ApiError(405, f"{request.method:.20} {path:.80}: Method Not Allowed")
            return _refusal(error, Allow=", ".join(allowed))
        if listed:
            return self._models(path[len(MODELS) + 1 :])
        return await self._complete(request, POSTS[path])

    def _models(self, name: str) -> Response:
        fields = {"object": "model", "created": self._started, "owned_by": "qfsdp"}
        found = {name: {"id": name, **fields} for name in self._served.models}
        if not name:
            return JSONResponse({"object": "list", "data": list(found.values())})
        if name not in found:
            message = f"model: {name!r:.80} does not exist"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(found[name])

    async def _complete(self, request: HttpRequest, chat: bool) -> Response:
        served, limits = self._served, self._served.limits
        self._check_room()
        body = await _body(request, parse_size(limits.body), limits.client_seconds)
        asked = parse(body, chat, list(served.models), served.usual, limits)
        self._check_room()
        place = object()
        self._places.add(place)
        leave = partial(self._places.discard, place)
        try:
            prompt = await self._tokens(asked, "messages" if chat else "prompt")
            answer = Answer(self._with_room(asked, len(prompt)), prompt, chat, served, leave)
        except BaseException:
            leave()
            raise
        if asked.stream:
            return EventStream(answer)
        return JSONResponse(await answer.whole(request))

    def _check_room(self) -> None:
        """Counts requests, not connections, and before any work for the prompt."""
        limits = self._served.limits
        if len(self._places) >= limits.running + limits.waiting:
            message = f"{limits.waiting} requests wait already; try again later"
            raise ApiError(429, message, None, "rate_limit_exceeded")

    async def _tokens(self, asked: Asked, name: str) -> list[int]:
        served, model, prompt = self._served, self._served.models[asked.model], asked.prompt
        most = min(served.limits.prompt_tokens, served.positions - 1)
        try:
            if name == "prompt" and isinstance(prompt, list):
                tokens: Any = prompt
            else:
                characters = sum(map(len, texts_of(_contents(prompt))))
                least = characters // getattr(model.tokenizer, "longest_token", characters + 1)
                if least > most:  # 900 KB of digits took 2 s to tokenize
                    raise _too_long(name, f"at least {least}", most)
                given: Any = (prompt_tokens, model.tokenizer, prompt, name == "messages", None)
                if characters <= LONG:
                    tokens = await asyncio.to_thread(*given)
                else:
                    async with self._long:
                        tokens = await asyncio.to_thread(*given)
            if not 1 <= len(tokens) <= most:
                raise _too_long(name, str(len(tokens)), most)
            check_ids(name, tokens, model.decoder.config.vocab_size)
        except UserError as error:
            raise ApiError(400, f"{name}: {error}", name, "invalid_value") from None
        return list(tokens)

    def _with_room(self, asked: Asked, prompt: int) -> Asked:
        """The request with a length that the model's positions allow."""
        config, new = self._served.config, asked.sampling.max_new_tokens
        most = config.most_positions(prompt)
        if prompt + new <= most:
            return asked
        if asked.limited:
            message = f"max_tokens: {new} after {prompt} tokens of the prompt; expected at most "
            message += positions_of(config, most)
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        return replace(
            asked, sampling=replace(asked.sampling, max_new_tokens=max(1, most - prompt))
        )


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
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "content-encoding: expected none")
    large = ApiError(413, f"the body has more than {most:,} bytes")
    if int(request.headers.get("content-length", "0")) > most:  # h11 has checked that it is one
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise large
    except TimeoutError:
        raise ApiError(408, f"no whole request within {seconds:g} s", None, "timeout") from None
    return bytes(body)


def _contents(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    return [message.get("content") for message in prompt if isinstance(message, dict)]


def _too_long(name: str, tokens: str, most: int) -> ApiError:
    message = f"{name}: {tokens} tokens; expected 1 to {most}"
    return ApiError(400, message, name, "context_length_exceeded")


def _is_own(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # "[": no address
        return False


def _refusal(error: ApiError, **headers: str) -> Response:
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONResponse(error.body(), error.status, headers)
