"""What a server serves, to whom, and within which limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from qfsdp.common.errors import InvalidField, check_bounds
from qfsdp.common.sizes import parse_size
from qfsdp.evaluation.generation import SamplingConfig
from qfsdp.evaluation.serving.engine import Engine, Model
from qfsdp.modules.hub_models.config import AnyConfig


@dataclass
class LimitsConfig:
    """Section `limits` of the server; what exceeds one is refused with an error that names it.

    Fields:
        running: requests that are answered at the same time. The cache of keys and values grows
            with it.
        waiting: requests that wait for that; more get status 429. Connections are no requests:
            one that sends nothing takes no place.
        prompt_tokens: longest prompt in tokens.
        new_tokens: longest answer in tokens, and so the largest `max_tokens`.
        body: size of a request, such as 1MiB.
        seconds: time for a request, waiting included.
        client_seconds: time for a client to send the headers of a request, and its body; to send
            the next request; and to take what has been sent to it. The connection is then closed.
    """

    running: int = 32
    waiting: int = 64
    prompt_tokens: int = 4096
    new_tokens: int = 1024
    body: str | int = "1MiB"
    seconds: float = 600.0
    client_seconds: float = 20.0

    def check(self) -> None:
        check_bounds(self, "running", "waiting", "prompt_tokens", "new_tokens", least=1)
        try:
            parse_size(self.body)
        except ValueError as error:
            raise InvalidField("body", self.body, str(error).partition("expected ")[2]) from None
        for name in ("seconds", "client_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidField(name, getattr(self, name), "a number above 0")


@dataclass
class Served:
    """What a server answers with.

    Fields:
        models: by the names that requests use, the base first.
        usual: sampling where a request leaves fields out.
        api_key: clients must send it; None: nobody needs one.
        host: the address that the server listens on.
    """

    engine: Engine
    models: Mapping[str, Model]
    usual: SamplingConfig
    limits: LimitsConfig
    api_key: str | None
    host: str

    @property
    def positions(self) -> int:
        """The longest row of tokens, prompt and answer."""
        return self.config.max_position_embeddings

    @property
    def config(self) -> AnyConfig:
        """Of all models."""
        return next(iter(self.models.values())).decoder.config


def is_loopback(host: str) -> bool:
    """Whether an address or a name is this machine's own, which no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
