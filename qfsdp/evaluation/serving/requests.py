"""What a client asks for: the fields of OpenAI's requests, checked one by one.

https://platform.openai.com/docs/api-reference/chat and /completions. A field that would change the
answer and that this server does not know is refused; so is a name that OpenAI's API does not have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qfsdp.evaluation.generation import SamplingConfig
from qfsdp.evaluation.serving.served import LimitsConfig

MOST_STOPS, MOST_STOP_CHARACTERS = 4, 256
# Fields that change nothing here, whatever their value.
IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
# Fields that are allowed with the value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
}
KNOWN = {"model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"}
OF_STREAMS = {"include_usage", "include_obfuscation"}
OF_CHAT, OF_TEXT = {"messages", "max_completion_tokens"}, {"prompt"}


class ApiError(Exception):
    """An error in OpenAI's form.

    Fields:
        status: of HTTP.
        param: the request's field that is wrong, or None.
        code: OpenAI's short name of the error, or None.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else None)
        kind = kind or "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass
class Asked:
    """A request for an answer.

    Fields:
        model: name of a model of this server.
        prompt: a conversation, a text, or token ids.
        sampling: `max_new_tokens` is what the client asked for, or the server's own.
        limited: the client gave the length; if not, the model's positions may shorten it.
        usage: end a stream with the numbers of tokens.
    """

    model: str
    prompt: list[dict[str, Any]] | str | list[int]
    sampling: SamplingConfig
    limited: bool
    stops: list[str] = field(default_factory=list)
    stream: bool = False
    usage: bool = False


def parse(
    body: bytes, chat: bool, models: Sequence[str], usual: SamplingConfig, limits: LimitsConfig
) -> Asked:
    """Reads the JSON of a request.

    Args:
        chat: it is for /v1/chat/completions, else for /v1/completions.
        models: their names.
        usual: for fields that the request leaves out.

    Raises:
        ApiError: with the field that is wrong.
    """
    given = _object(body)
    _check_names(given, KNOWN | (OF_CHAT if chat else OF_TEXT))
    model = _typed(given, "model", str, "the name of a model")
    if model not in models:
        known = ", ".join(models)
        message = f"model: {model!r} does not exist; expected one of {known}"
        raise ApiError(404, message, "model", "model_not_found")
    sampling, limited = _sampling(given, usual, limits)
    options = given.get("stream_options") or {}
    if not isinstance(options, dict) or not options.keys() <= OF_STREAMS:
        raise _wrong("stream_options", options, "an object with include_usage")
    return Asked(
        model=model,
        prompt=_messages(given) if chat else _text(given),
        sampling=sampling,
        limited=limited,
        stops=_stops(given.get("stop")),
        stream=_flag(given, "stream"),
        usage=_flag(options, "include_usage"),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
        json.dumps(given, ensure_ascii=False).encode()  # half of a pair, "\\ud800", is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {ascii(str(error))[1:-1]}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is no JSON object; expected one")
    return {name: value for name, value in given.items() if value is not None}


def _check_names(given: dict[str, Any], known: set[str]) -> None:
    for name, value in given.items():
        if name in known | IGNORED:
            continue
        if name not in NEUTRAL:
            raise ApiError(400, f"{name}: unknown field", name, "unknown_parameter")
        if value not in NEUTRAL[name]:
            expected = " or ".join(json.dumps(one) for one in NEUTRAL[name])
            raise _wrong(name, value, f"{expected}; this server has nothing else")


def _sampling(
    given: dict[str, Any], usual: SamplingConfig, limits: LimitsConfig
) -> tuple[SamplingConfig, bool]:
    changes: dict[str, Any] = {}
    if "temperature" in given:
        value = given["temperature"]
        if not _is_number(value) or not 0 <= value <= 2:
            raise _wrong("temperature", value, "a number from 0 to 2")
        changes["temperature"] = float(value)
    if "top_p" in given:
        value = given["top_p"]
        if not _is_number(value) or not 0 < value <= 1:
            raise _wrong("top_p", value, "a number above 0, at most 1")
        changes["top_p"] = float(value)
    if "seed" in given:
        seed = given["seed"]
        if not _is_integer(seed) or not -(2**63) <= seed < 2**63:
            raise _wrong("seed", seed, "an integer of 64 bits")
        changes["seed"] = seed
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            value = given[name]
            if not _is_integer(value) or not 1 <= value <= limits.new_tokens:
                raise _wrong(name, value, f"an integer from 1 to {limits.new_tokens}")
            changes["max_new_tokens"] = value
    limited = "max_new_tokens" in changes
    if not limited:
        changes["max_new_tokens"] = min(usual.max_new_tokens, limits.new_tokens)
    return replace(usual, **changes), limited


def _messages(given: dict[str, Any]) -> list[dict[str, Any]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of messages with role and content")
    return messages


def _text(given: dict[str, Any]) -> str | list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_integer, prompt)):
        return prompt
    raise _wrong("prompt", prompt, "one text, or one list of token ids")


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    good = isinstance(stops, list) and len(stops) <= MOST_STOPS
    lengths = [len(one) if isinstance(one, str) else 0 for one in stops] if good else []
    if not good or not all(1 <= length <= MOST_STOP_CHARACTERS for length in lengths):
        expected = f"up to {MOST_STOPS} texts of 1 to {MOST_STOP_CHARACTERS} characters"
        raise _wrong("stop", stop, expected)
    return stops


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name) or False
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _typed(given: dict[str, Any], name: str, kind: type, expected: str) -> Any:
    value = given.get(name)
    if not isinstance(value, kind):
        raise _wrong(name, value, expected)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, value: Any, expected: str) -> ApiError:
    text = json.dumps(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return ApiError(400, f"{name}: {text} is not valid; expected {expected}", name, "invalid_value")
