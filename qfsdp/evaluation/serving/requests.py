"""What a client asks for: the fields of OpenAI's requests, checked one by one.

https://platform.openai.com/docs/api-reference/chat and /completions. A field that would change the
answer and that this server does not know is refused; so is a name that OpenAI's API does not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from qfsdp.evaluation.generation import SamplingConfig
from qfsdp.evaluation.serving.served import LimitsConfig

OF_SAMPLING = ("temperature", "top_p", "seed")
MOST_STOPS, MOST_STOP_CHARACTERS = 4, 256
# Fields that change nothing here, whatever their value.
IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
IGNORED |= {"prompt_cache_retention", "prompt_cache_options", "prediction"}
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
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
}


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
        super().__init__(message[:500])
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else None)
        kind = kind or "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def failed() -> ApiError:
    """The error of what is not the client's mistake."""
    return ApiError(500, "the server failed; its log says why", None, "failed")


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_one_of(allowed: Sequence[Any], value: Any) -> bool:
    """False is not 0: `logprobs: 0` asks for those of the answer's own tokens."""
    return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in allowed)


def _is_prompt(value: Any) -> bool:
    return bool(value) and (
        isinstance(value, str) or (isinstance(value, list) and all(map(_is_integer, value)))
    )


def _are_stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= MOST_STOPS
        and all(isinstance(one, str) and 0 < len(one) <= MOST_STOP_CHARACTERS for one in stops)
    )


def _are_messages(value: Any) -> bool:
    """Without content a prompt would be answered as an empty one; an answer may have calls alone.
    What else is wrong with a message is told by its number, see `as_message`."""
    return (
        isinstance(value, list)
        and bool(value)
        and not any(
            isinstance(one, dict) and one.get("role") != "assistant" and one.get("content") is None
            for one in value
        )
    )


FLAG: tuple[Callable[[Any], bool], str] = (lambda v: isinstance(v, bool), "true or false")
OF_STREAMS = {f"stream_options.{name}": FLAG for name in ("include_usage", "include_obfuscation")}


def _fields(chat: bool, most: int) -> dict[str, tuple[Any, str]]:
    """What the fields of a request may be: a test of the value, and what it expects."""
    length = (lambda v: _is_integer(v) and 1 <= v <= most, f"an integer from 1 to {most}")
    stops = f"up to {MOST_STOPS} texts of 1 to {MOST_STOP_CHARACTERS} characters"
    fields: dict[str, tuple[Any, str]] = {
        "model": (lambda v: isinstance(v, str), "the name of a model"),
        "temperature": (lambda v: _is_number(v) and 0 <= v <= 2, "a number from 0 to 2"),
        "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
        "seed": (lambda v: _is_integer(v) and -(2**63) <= v < 2**63, "an integer of 64 bits"),
        "max_tokens": length,
        "stop": (_are_stops, stops),
        "stream": FLAG,
        "stream_options": (lambda v: isinstance(v, dict), "an object"),
    }
    if not chat:
        return fields | {"prompt": (_is_prompt, "one text, or one list of token ids")}
    messages = (_are_messages, "a list of messages with role and content")
    return fields | {"messages": messages, "max_completion_tokens": length}


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
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        given["prompt"] = prompt[0]
    fields = _fields(chat, limits.new_tokens)
    for name in ("model", "messages" if chat else "prompt"):
        given.setdefault(name, None)
    _check(given, fields)
    model, options = given["model"], _without_null(given.get("stream_options", {}))
    if model not in models:
        message = f"model: {model!r:.80} does not exist; expected one of {', '.join(models)}"
        raise ApiError(404, message, "model", "model_not_found")
    _check({f"stream_options.{name}": value for name, value in options.items()}, OF_STREAMS)
    length = given.get("max_completion_tokens", given.get("max_tokens"))
    stop = given.get("stop", [])
    changes: dict[str, Any] = {name: given[name] for name in OF_SAMPLING if name in given}
    changes["max_new_tokens"] = length or min(usual.max_new_tokens, limits.new_tokens)
    return Asked(
        model,
        given["messages" if chat else "prompt"],
        replace(usual, **changes),
        length is not None,
        [stop] if isinstance(stop, str) else stop,
        given.get("stream", False),
        options.get("include_usage", False),
    )


def _object(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        given = json.loads(body, parse_constant=refuse)
        json.dumps(given, ensure_ascii=False).encode()  # half of a pair, "\\ud800", is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {ascii(str(error))[1:-1]:.200}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is no JSON object; expected one")
    return _without_null(given)


def _without_null(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _check(given: dict[str, Any], fields: dict[str, tuple[Any, str]]) -> None:
    for name, value in given.items():
        if name in fields:
            good, expected = fields[name]
        elif name in NEUTRAL:
            allowed = NEUTRAL[name]
            good = partial(_is_one_of, allowed)
            expected = " or ".join(map(json.dumps, allowed)) + "; this server has nothing else"
        elif name in IGNORED:
            continue
        else:
            raise ApiError(400, f"{name:.80}: unknown field", name[:80], "unknown_parameter")
        if not good(value):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            message = f"{name}: {shown} is not valid; expected {expected}"
            raise ApiError(400, message, name, "invalid_value")
