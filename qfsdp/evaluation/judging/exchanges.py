"""Asks OpenAI-compatible endpoints, and keeps every exchange in a file.

    exchanges.jsonl   a line for each: {"key", "request", "response"}, in the order of the answers

The key is a hash of the request. A request whose key is in the file is not sent again: a run that
was interrupted goes on where it was, and pays for no answer twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.cli.files import to_json
from qfsdp.cli.progress import moved


@dataclass
class EndpointConfig:
    """A model behind an OpenAI-compatible API.

    Fields:
        url: such as http://127.0.0.1:8000/v1, or https://api.openai.com/v1.
        model: its name there.
        key_variable: environment variable with the API key; a server without keys needs none.
        max_tokens: of an answer.
        temperature: 0 is greedy.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    max_tokens: int = 512
    temperature: float = 0.0

    def check(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidField("url", self.url, "one that begins with http:// or https://")
        if self.max_tokens < 1:
            raise InvalidField("max_tokens", self.max_tokens, "an integer of at least 1")


class Exchanges:
    """The exchanges of a run.

    Args:
        file: is read first, and appended to.
        in_flight: requests at a time.
        seconds: time for a request.

    Fields:
        sent, known: numbers of requests that were sent, and that the file had.
    """

    def __init__(self, file: Path, in_flight: int, seconds: float) -> None:
        self._file, self._seconds = file, seconds
        self._free = asyncio.Semaphore(in_flight)
        self._clients: dict[tuple[str, str], Any] = {}
        self._known = _read(file)
        self.sent = self.known = 0

    async def ask(self, key: str, endpoint: EndpointConfig, messages: list[dict[str, str]]) -> str:
        """The text that a model answers; "" if it refuses.

        Args:
            key: the endpoint's place in the config, for messages.

        Raises:
            UserError: the endpoint cannot be reached, or refuses the request, three times.
        """
        request = {
            "url": endpoint.url,
            "model": endpoint.model,
            "messages": messages,
            "max_tokens": endpoint.max_tokens,
            "temperature": endpoint.temperature,
        }
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if digest in self._known:
            self.known += 1
        else:
            async with self._free:
                response = await self._send(key, endpoint, request)
            self._keep({"key": digest, "request": request, "response": response})
            self._known[digest] = response
            self.sent += 1
            moved()
        message = self._known[digest]["choices"][0]["message"]
        return str(message.get("content") or "")

    async def _send(self, key: str, endpoint: EndpointConfig, request: dict[str, Any]) -> Any:
        import openai

        given = {name: value for name, value in request.items() if name != "url"}
        try:
            response = await self._client(endpoint).chat.completions.create(**given)
        except openai.APIConnectionError as error:
            raise UserError(f"{key}.url: {endpoint.url} cannot be reached: {error}") from None
        except openai.APIStatusError as error:
            text = str(error.message)[:200]
            raise UserError(f"{key}: {endpoint.url} answers {error.status_code}: {text}") from None
        if not response.choices:
            raise UserError(f"{key}: {endpoint.url} gives no choices; expected one answer")
        return response.model_dump(mode="json", exclude_none=True)

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
            raise UserError(f"'{self._file}': cannot be written: {error.strerror}") from None


def _read(file: Path) -> dict[str, Any]:
    """Key -> response. A last line without its end is cut off: the process was killed there."""
    if not file.is_file():
        return {}
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    known = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            known[row["key"]] = row["response"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{file}, line {number}: no exchange; expected those of a run"
            ) from None
    return known


def describe(endpoint: EndpointConfig) -> dict[str, Any]:
    """An endpoint for the results."""
    return asdict(endpoint)
