"""Asks OpenAI-compatible endpoints, and keeps every exchange in a file.

    exchanges.jsonl   a line for each: {"key", "request", "response"}, in the order of the answers

The key is a hash of the request. A request whose key is in the file is not sent again: a run that
was interrupted goes on where it was, and pays for no answer twice. What is no answer is not kept,
and one that an earlier version kept is asked again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.files import not_written, to_json
from qfsdp.common.progress import moved

LARGEST = 2**24  # bytes of an answer


@dataclass
class EndpointConfig:
    """A model behind an OpenAI-compatible API.

    Fields:
        url: such as http://127.0.0.1:8000/v1, or https://api.openai.com/v1.
        model: its name there.
        key_variable: environment variable with the API key; a server without keys needs none.
        max_tokens: of an answer. None: not sent.
        temperature: 0 is greedy. None: not sent.
        options: further fields of a request, sent as they are. Models that reason may take no
            `max_tokens` and no temperature, but `max_completion_tokens` and `reasoning_effort`.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    max_tokens: int | None = 512
    temperature: float | None = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidField("url", self.url, "one that begins with http:// or https://")
        check_bounds(self, "max_tokens", least=1)
        own = {"model", "messages", "max_tokens", "temperature", "stream"}
        for name in own & set(self.options):
            raise InvalidField(f"options.{name}", self.options[name], "a field that has no own key")


class Exchanges:
    """The exchanges of a run. Its folder must be locked: two runs would ask everything twice.

    Args:
        file: is read first, and appended to.
        in_flight: requests at a time.
        seconds: time for a request, from the first byte sent to the last one received.

    Fields:
        sent, known: numbers of requests that were sent, and that the file had.
    """

    def __init__(self, file: Path, in_flight: int, seconds: float) -> None:
        self._file, self._seconds = file, seconds
        self._free = asyncio.Semaphore(in_flight)
        self._asked: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._clients: dict[tuple[str, str], Any] = {}
        self._texts = _read(file)
        self.sent = self.known = 0

    async def ask(self, key: str, endpoint: EndpointConfig, messages: list[dict[str, str]]) -> str:
        """The text that a model answers; "" if it refuses.

        Args:
            key: the endpoint's place in the config, for messages.

        Raises:
            UserError: the endpoint cannot be reached or refuses the request, three times; takes too
                long; or what it answers is no answer.
        """
        limits = {"max_tokens": endpoint.max_tokens, "temperature": endpoint.temperature}
        request = {
            "url": endpoint.url,
            "model": endpoint.model,
            "messages": messages,
            **{name: value for name, value in limits.items() if value is not None},
            **endpoint.options,
        }
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        async with self._asked[digest]:  # an equal request waits for this one's answer
            if digest in self._texts:
                self.known += 1
                return self._texts[digest]
            async with self._free:
                data = await self._send(key, endpoint, request)
            try:
                response = json.loads(data)
                text = answer_text(response)
            except (ValueError, RecursionError) as error:
                what = error if type(error) is ValueError else "no JSON"
                raise UserError(
                    f"{key}: {endpoint.url} answers {data[:80]!r} ({what}); expected "
                    "a chat completion in OpenAI's form"
                ) from None
            self._keep({"key": digest, "request": request, "response": response})
            self._texts[digest] = text
            self.sent += 1
            moved()
            return text

    async def _send(self, key: str, endpoint: EndpointConfig, request: dict[str, Any]) -> bytes:
        """The body of the endpoint's answer."""
        import openai

        body = {name: value for name, value in request.items() if name != "url"}
        # The client checks names of fields, and knows fewer than some endpoints; not in extra_body.
        ours = {name: body.pop(name) for name in ("model", "messages")}
        chats = self._client(endpoint).chat.completions.with_streaming_response
        asking = chats.create(**ours, extra_body=body)
        data = b""
        try:
            # The client's own limit is for each read: an answer that drips would never end.
            async with asyncio.timeout(self._seconds), asking as answer:
                async for part in answer.iter_bytes():
                    data += part
                    if len(data) > LARGEST:
                        raise UserError(
                            f"{key}: {endpoint.url} answers more than {LARGEST:,} bytes"
                        )
        except UserError:
            raise
        except openai.APIStatusError as error:
            text = ascii(str(error.message)[:200])[1:-1]
            raise UserError(f"{key}: {endpoint.url} answers {error.status_code}: {text}") from None
        except (TimeoutError, openai.APITimeoutError):
            raise UserError(
                f"{key}: {endpoint.url} gives no whole answer within {self._seconds:g} s; expected "
                "one, or a larger request_timeout"
            ) from None
        except Exception as error:  # of the client's libraries: no connection, no HTTP, no URL
            why = ascii(str(error) or type(error).__name__)[1:-1]
            raise UserError(f"{key}.url: {endpoint.url} cannot be reached: {why:.200}") from None
        if len(data) > LARGEST:
            raise UserError(f"{key}: {endpoint.url} answers more than {LARGEST:,} bytes")
        return data

    def _client(self, endpoint: EndpointConfig) -> Any:
        import openai

        which = (endpoint.url, endpoint.key_variable)
        if which not in self._clients:
            self._clients[which] = openai.AsyncOpenAI(
                base_url=endpoint.url,
                api_key=os.environ.get(endpoint.key_variable) or "none",
                timeout=self._seconds,
                max_retries=2,
            )
        return self._clients[which]

    def _keep(self, exchange: dict[str, Any]) -> None:
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(to_json(exchange) + "\n")
        except OSError as error:
            raise UserError(not_written(self._file, error)) from None


def answer_text(response: Any) -> str:
    """The text of a chat completion; "" if the model refuses, or stopped before it said anything.
    Raises ValueError: there is no answer in it."""
    if not isinstance(response, dict):
        raise ValueError("no object")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("no choices")
    message, why = choices[0].get("message"), choices[0].get("finish_reason")
    if not isinstance(message, dict):
        raise ValueError("no message")
    content = message.get("content")
    if content is None and (message.get("refusal") or why in ("length", "content_filter")):
        return ""
    if not isinstance(content, str):
        raise ValueError("a message without text")
    # Half of a surrogate pair, which JSON can hold, cannot be sent to the judge.
    return content.encode(errors="replace").decode()


def _read(file: Path) -> dict[str, str]:
    """Key -> text. A last line without its end is cut off: the process was killed there."""
    if not file.is_file():
        return {}
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    texts = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            key, response = str(row["key"]), row["response"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{file}, line {number}: no exchange; expected those of a run"
            ) from None
        try:
            texts[key] = answer_text(response)
        except ValueError:
            texts.pop(key, None)
    return texts
