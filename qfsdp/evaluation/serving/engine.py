"""Runs decoders for many requests together, which join and leave between two tokens.

One thread does all the computing. In each round it admits waiting requests, whose prompts run one
by one, and then makes one token for every running request:

    round 1   prompt a          a
    round 2   prompt b          a b
    round 3                     a b        a ends: its row is free
    round 4   prompt c          b c

A prompt runs alone, and rows of a batch do not see each other. So an answer is the one that
`qfsdp.evaluation.generation.generate` gives, up to the rounding of products of other sizes. The
requests of one model (the base, or an adapter) form a batch; several models take turns. Rows of a
model of transformers run one after another, see `HubCache`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from qfsdp.evaluation.generation import (
    NO_TOKEN,
    NOT_FINITE,
    SamplingConfig,
    likeliest,
    prompt_randoms,
    sample_tokens,
    start,
)
from qfsdp.evaluation.prompts import special_stops
from qfsdp.evaluation.text_stream import AnswerText
from qfsdp.modules.attention.kv_cache import KVCache
from qfsdp.modules.attention.request_cache import RequestCache
from qfsdp.modules.hub_models.cache import HubCache
from qfsdp.modules.hub_models.decoder import AnyDecoder, HubDecoder
from qfsdp.tensor_subclasses import few_rows

log = logging.getLogger("qfsdp")

Finish = Literal["stop", "length", "timeout", "failed", "closing"]
PROMPT_TOKENS_PER_ROUND = 2048  # while others wait for their next token


@dataclass(frozen=True)
class Model:
    """A decoder in eval mode, its tokenizer, and the tokens that end its answers."""

    decoder: AnyDecoder
    tokenizer: Any
    stop_ids: set[int]


@dataclass
class Piece:
    """A part of an answer.

    Fields:
        text: may be empty.
        finish: why the answer ends with this piece; None if it goes on.
        tokens: number of the answer's tokens so far.
    """

    text: str
    finish: Finish | None
    tokens: int


@dataclass(eq=False)
class Request:
    """A prompt and how to answer it.

    Fields:
        model: name of the decoder.
        prompt: token ids, at least one.
        stops: texts that end the answer.
        tell: called with every piece, in the engine's thread; it must return at once.
        deadline: `time.monotonic()` at which the request is given up.
        cancelled: set it to free the request's row; nothing more is told.
    """

    model: str
    prompt: list[int]
    sampling: SamplingConfig
    stops: Sequence[str]
    tell: Callable[[Piece], None]
    deadline: float
    cancelled: threading.Event = field(default_factory=threading.Event)


class _Row:
    """A request that waits or runs, and its answer so far."""

    def __init__(self, request: Request, model: Model) -> None:
        self.request = request
        self._stop_ids = model.stop_ids | special_stops(model.tokenizer, request.stops)
        self._text = AnswerText(model.tokenizer, request.stops)
        self.tokens = 0
        self.last = 0  # the newest token

    @cached_property
    def _draws(self) -> Tensor:
        return prompt_randoms([self.request.prompt], self.request.sampling)[0]

    def sampled(self, logits: Tensor) -> int:
        """The next token from logits `[vocab]`."""
        draw = self._draws[self.tokens : self.tokens + 1].to(logits.device)
        return int(sample_tokens(logits.unsqueeze(0), draw, self.request.sampling))

    def take(self, token: int) -> bool:
        """Adds a token to the answer, and tells the text; returns whether the answer goes on."""
        if token == NO_TOKEN:
            log.error("serve: %s", NOT_FINITE)
            return self.finish("failed")
        if token in self._stop_ids:
            return self.finish("stop")
        self.last, self.tokens = token, self.tokens + 1
        text = self._text.push(token)
        if self._text.stopped:
            return self.finish("stop", text)
        if self.tokens == self.request.sampling.max_new_tokens:
            return self.finish("length", text)
        self.request.tell(Piece(text, None, self.tokens))
        return True

    def goes_on(self, now: float) -> bool:
        """False for a request that is cancelled or too late, which is told so."""
        if self.request.cancelled.is_set():
            return False
        return now < self.request.deadline or self.finish("timeout")

    def finish(self, why: Finish, text: str = "") -> bool:
        self.request.tell(Piece(text + self._text.end(), why, self.tokens))
        return False


class _Batch:
    """The running requests of one decoder, a row of the cache each."""

    def __init__(self, decoder: AnyDecoder, device: torch.device) -> None:
        self._decoder, self._device = decoder, device
        self._cache = self._empty_cache()
        self.rows: list[_Row] = []

    def _empty_cache(self) -> Any:
        if isinstance(self._decoder, HubDecoder):
            return HubCache([])
        return RequestCache(self._decoder.config, self._device)

    def run_prompt(self, row: _Row) -> tuple[KVCache | HubCache, Tensor]:
        """The cache of a prompt, and the logits `[vocab]` of the token after it."""
        prompt = row.request.prompt
        cache, tokens = start(self._decoder, [prompt], 0, self._device)
        return cache, self._decoder(tokens, cache=cache)[0]

    def join(self, row: _Row, cache: KVCache | HubCache, logits: Tensor) -> None:
        """Tells a prompt's first token; the row stays if the answer goes on."""
        if row.take(row.sampled(logits)):
            self._cache.add(cache, row.request.sampling.max_new_tokens)
            self.rows.append(row)

    def step(self) -> None:
        """One token for every row."""
        tokens = torch.tensor([[row.last] for row in self.rows], device=self._device)
        with few_rows.generating():
            logits = self._decoder(tokens, cache=self._cache)
        greedy_tokens = likeliest(logits).tolist()
        going = []
        for row, of_row, token in zip(self.rows, logits, greedy_tokens, strict=True):
            greedy = row.request.sampling.is_greedy
            going.append(row.take(token if greedy else row.sampled(of_row)))
        self._keep(going)

    def drop_ended(self, now: float) -> None:
        """Frees the rows of requests that are cancelled or too late."""
        self._keep([row.goes_on(now) for row in self.rows])

    def clear(self) -> None:
        """Frees all rows after an error, and tells their requests."""
        for row in self.rows:
            row.finish("failed")
        self.rows, self._cache = [], self._empty_cache()

    def _keep(self, going: Sequence[bool]) -> None:
        for at in reversed([at for at, goes_on in enumerate(going) if not goes_on]):
            last = self.rows.pop()
            if at < len(self.rows):
                self.rows[at] = last
            self._cache.remove(at)


class Engine:
    """Answers requests in a thread of its own, from `start` to `stop`.

    Args:
        models: by the names that requests use.
        most_running: requests that have a row at the same time. The others wait; whoever submits
            them bounds their number.
    """

    def __init__(
        self, models: Mapping[str, Model], device: torch.device, most_running: int
    ) -> None:
        self._models = models
        self._batches = {name: _Batch(model.decoder, device) for name, model in models.items()}
        self._most_running = most_running
        self._waiting: deque[_Row] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the round that it is in. Requests that are not answered by then,
        and those that come later, end with "closing"."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def submit(self, request: Request) -> None:
        """Queues a request."""
        row = _Row(request, self._models[request.model])
        with self._changed:
            if self._stopped:
                row.finish("closing")
                return
            self._waiting.append(row)
            self._changed.notify()

    @property
    def running(self) -> int:
        """The number of requests that have a row."""
        return sum(len(batch.rows) for batch in self._batches.values())

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting or self.running)
                if self._stopped:
                    running = [row for batch in self._batches.values() for row in batch.rows]
                    for row in [*running, *self._waiting]:
                        row.finish("closing")
                    return
            for row in self._admitted():
                self._admit(row)
            for batch in self._batches.values():
                batch.drop_ended(time.monotonic())
                if batch.rows:
                    self._guarded(batch, batch.step)

    def _admitted(self) -> list[_Row]:
        """Takes the requests whose prompts run in this round out of the queue."""
        chosen: list[_Row] = []
        tokens, now = 0, time.monotonic()
        with self._changed:
            while self._waiting and self.running + len(chosen) < self._most_running:
                tokens += len(self._waiting[0].request.prompt)
                if chosen and tokens > PROMPT_TOKENS_PER_ROUND:
                    break
                chosen.append(self._waiting.popleft())
            self._waiting = deque(row for row in self._waiting if row.goes_on(now))
        return [row for row in chosen if row.goes_on(now)]

    def _admit(self, row: _Row) -> None:
        """Runs a prompt; if that fails, this request fails and no other."""
        batch = self._batches[row.request.model]
        try:
            cache, logits = batch.run_prompt(row)
        except Exception:
            log.exception("serve: a prompt of %d tokens failed", len(row.request.prompt))
            row.finish("failed")
            return
        self._guarded(batch, lambda: batch.join(row, cache, logits), row)

    def _guarded(self, batch: _Batch, work: Callable[[], None], row: _Row | None = None) -> None:
        """Works on a batch. After an error its requests (and that of `row`) fail, and the engine
        goes on: the cache may be half written."""
        try:
            work()
        except Exception:
            log.exception("serve: %d requests failed", len(batch.rows))
            if row is not None and row not in batch.rows:
                row.finish("failed")
            batch.clear()
