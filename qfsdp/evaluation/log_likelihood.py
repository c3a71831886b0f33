"""Log-likelihoods of continuations of a context, such as the choices of a question.

All continuations of a context share a row: the context once, then one continuation after the other.
Each continuation attends to the context and to itself, at the positions that it would have alone.
So a question of 200 tokens with eight choices costs one pass over it instead of eight. The output
layer runs on the scored positions only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.evaluation.batching import batches_by_length, batches_of_rank
from qfsdp.evaluation.generation import NOT_FINITE
from qfsdp.evaluation.inference_model import evaluating
from qfsdp.modules.hub_models.decoder import AnyDecoder, HubDecoder
from qfsdp.modules.loss import CHUNK_LOGITS

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a context (at least one) and of its continuation."""
Likelihood = tuple[float, bool]
"""The summed log-probability of a continuation (nats), and whether greedy decoding gives it."""


@dataclass(frozen=True)
class _Row:
    """A context and some of its continuations. `inputs` is the number of input tokens."""

    context: tuple[int, ...]
    continuations: list[tuple[int, ...]]
    inputs: int


def log_likelihoods(
    model: AnyDecoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    world: World,
    batch_size: int,
) -> list[Likelihood]:
    """The log-likelihood of each continuation after its context. The same on every rank.

    All ranks must call it with the same pairs. A pair that is longer than the model's positions
    loses the beginning of its context. Equal pairs are computed once.

    Args:
        model: sharded or not.
        pairs: contexts (at least one token) and continuations. An empty continuation gets 0.
        batch_size: contexts per forward pass.

    Raises:
        UserError: logits are not finite.
    """
    wanted = [_shorten(*pair, model.config.max_position_embeddings) for pair in pairs]
    rows = _rows(wanted, _longest_row(model))
    batches = batches_by_length([row.inputs for row in rows], batch_size)
    found: dict[Pair, Likelihood] = {}
    with evaluating(model):
        for chosen in batches_of_rank(batches, world, "scoring"):
            # A rank without a batch runs one token, because the others have collectives.
            mine = [rows[index] for index in chosen] or [_Row((0,), [(0,)], 1)]
            scores = _score(model, mine, world.device)
            if chosen:
                found.update(scores)
    for of_rank in world.gather(found):
        found.update(of_rank)
    if not all(math.isfinite(value) for value, _ in found.values()):
        raise UserError(NOT_FINITE)  # the first of all choices would be the answer
    return [found[pair] if pair[1] else (0.0, True) for pair in wanted]


def _shorten(context: Sequence[int], continuation: Sequence[int], positions: int) -> Pair:
    """Cuts the beginning of a pair so that all its tokens except the last fit into `positions`."""
    whole = (*context, *continuation)[-(positions + 1) :]
    kept = min(len(continuation), len(whole) - 1)
    return whole[: len(whole) - kept], whole[len(whole) - kept :]


def _longest_row(model: AnyDecoder) -> int:
    """Longest row with several continuations.

    Each continuation has a row of its own where there is no mask (attention with sinks, recurrent
    layers, models of transformers), and where a rotary embedding depends on the row's length. A
    sliding window counts the other continuations of a row too, so a row is no longer than the
    window.
    """
    if isinstance(model, HubDecoder):
        return 0
    config = model.config
    if config.attention.sinks or config.by_length or config.recurrent is not None:
        return 0
    return config.shortest_window or 1 << 30


def _rows(pairs: list[Pair], longest: int) -> list[_Row]:
    """Groups the pairs by context into rows, each pair once.

    A row with several continuations has at most max(512, twice its context) and at most `longest`
    tokens, because the cost of attention grows with the square of the row's length.
    """
    by_context: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for context, continuation in pairs:
        if continuation:
            by_context.setdefault(context, {})[continuation] = None
    rows = []
    for context, continuations in by_context.items():
        limit = min(max(2 * len(context), 512), longest)
        row = _Row(context, [], len(context))
        for continuation in continuations:
            more = len(continuation) - 1
            if row.continuations and row.inputs + more > limit:
                rows.append(row)
                row = _Row(context, [], len(context))
            row = _Row(context, [*row.continuations, continuation], row.inputs + more)
        rows.append(row)
    return rows


def _score(model: AnyDecoder, rows: list[_Row], device: torch.device) -> dict[Pair, Likelihood]:
    tokens, positions, mask, scored, targets = (
        None if part is None else part.to(device) for part in _inputs(rows)
    )
    assert scored is not None and targets is not None
    if isinstance(model, HubDecoder):
        positions = None  # it would take padding for further samples
    with _output_at(model, scored):
        logits = model(tokens, positions, mask).flatten(0, -2)
    likelihoods, greedy = [], []
    step = max(1, CHUNK_LOGITS // logits.shape[-1])
    for start in range(0, len(targets), step):
        chunk, chosen = logits[start : start + step].float(), targets[start : start + step]
        total = chunk.logsumexp(-1)
        likelihoods.append(chunk.gather(1, chosen.unsqueeze(1)).squeeze(1) - total)
        greedy.append(chunk.argmax(-1) == chosen)
    values = iter(torch.cat(likelihoods).double().tolist())
    hits = iter(torch.cat(greedy).tolist())
    return {
        (row.context, continuation): (
            sum(islice(values, len(continuation))),
            all(list(islice(hits, len(continuation)))),
        )
        for row in rows
        for continuation in row.continuations
    }


def _inputs(rows: list[_Row]) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Tokens, positions, mask, scored positions and targets of one forward pass.

    Returns:
        tokens, positions: int64 `[rows, longest]`.
        mask: bool `[rows, 1, longest, longest]`; None if no row has two continuations.
        scored: int64 `[targets, 2]`, the row and the place in it that predict each target.
        targets: int64 `[targets]`.
    """
    shape = (len(rows), max(row.inputs for row in rows))
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    branch = torch.full(shape, -1)  # 0: context; n: n-th continuation
    scored: list[tuple[int, int]] = []
    targets: list[int] = []
    for at, row in enumerate(rows):
        last = len(row.context) - 1
        tokens[at, : last + 1] = torch.tensor(row.context)
        positions[at, : last + 1] = torch.arange(last + 1)
        branch[at, : last + 1] = 0
        start = last + 1
        for number, continuation in enumerate(row.continuations, start=1):
            end = start + len(continuation) - 1
            tokens[at, start:end] = torch.tensor(continuation[:-1], dtype=torch.int64)
            positions[at, start:end] = torch.arange(last + 1, last + 1 + end - start)
            branch[at, start:end] = number
            scored += [(at, place) for place in (last, *range(start, end))]
            targets += continuation
            start = end
    mask = None
    if any(len(row.continuations) > 1 for row in rows):
        seen = (branch == 0)[:, None, :] | (branch[:, :, None] == branch[:, None, :])
        mask = seen.tril().unsqueeze(1)
    return tokens, positions, mask, torch.tensor(scored), torch.tensor(targets)


@contextmanager
def _output_at(model: AnyDecoder, places: Tensor) -> Iterator[None]:
    """Context in which the model returns logits of `places` only: `[targets, vocab]`."""

    def select(module: Any, args: Any, out: Tensor) -> Tensor:
        return out[places[:, 0], places[:, 1]]

    def of_body(module: Any, args: Any, out: Any) -> Any:
        out.last_hidden_state = select(module, args, out.last_hidden_state).unsqueeze(0)
        return out

    # Not of the output layer: a split one (`Decoder.split`) is not called.
    if isinstance(model, HubDecoder):
        handle = model.parts.body.register_forward_hook(of_body)
    else:
        handle = model.body.norm.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
