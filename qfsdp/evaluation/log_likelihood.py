"""Log-likelihoods of continuations of a context, such as the choices of a question.

All continuations of one context share a row: the context once, then one continuation after the
other, each seeing the context and itself, at the positions where it would stand alone. So a
question of 200 tokens with eight choices costs one pass over it instead of eight. The output layer
sees the scored positions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from qfsdp.distributed.world import World
from qfsdp.evaluation.batching import batches_by_length, batches_of_rank
from qfsdp.evaluation.inference_model import evaluating
from qfsdp.modules.loss import CHUNK_LOGITS
from qfsdp.modules.transformer import Decoder

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a context, at least one, and of its continuation."""
Likelihood = tuple[float, bool]
"""Summed log-probability of a continuation (nats); whether greedy decoding gives it."""


@dataclass(frozen=True)
class _Row:
    """A context and some of its continuations; `inputs` is the number of tokens that go in."""

    context: tuple[int, ...]
    continuations: list[tuple[int, ...]]
    inputs: int


def log_likelihoods(
    model: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    world: World,
    batch_size: int,
    title: str = "scoring",
) -> list[Likelihood]:
    """Scores of continuations, each after its context; the same on every rank.

    A pair that is longer than the model's positions loses the beginning of its context. Equal
    pairs are computed once.

    Args:
        model: sharded or not; all ranks call this with the same pairs.
        pairs: context (at least one token) and continuation. Of an empty one the score is 0.
        batch_size: contexts in a forward pass.
        title: of the progress bar.
    """
    wanted = [_shorten(*pair, model.config.max_position_embeddings) for pair in pairs]
    rows = _rows(wanted, _longest_row(model))
    batches = batches_by_length([row.inputs for row in rows], batch_size)
    found: dict[Pair, Likelihood] = {}
    with evaluating(model):
        for chosen in batches_of_rank(batches, world, title):
            # A rank without a batch runs one token, in step with the others.
            mine = [rows[index] for index in chosen] or [_Row((0,), [(0,)], 1)]
            scores = _score(model, mine, world.device)
            if chosen:
                found.update(scores)
    for of_rank in world.gather(found):
        found.update(of_rank)
    return [found[pair] if pair[1] else (0.0, True) for pair in wanted]


def _shorten(context: Sequence[int], continuation: Sequence[int], positions: int) -> Pair:
    """A pair whose tokens, but for the last, are at most `positions`."""
    whole = (*context, *continuation)[-(positions + 1) :]
    kept = min(len(continuation), len(whole) - 1)
    return whole[: len(whole) - kept], whole[len(whole) - kept :]


def _longest_row(model: Decoder) -> int:
    """Above this a row holds one continuation: the sliding window counts places in the row."""
    return model.config.sliding_window or 1 << 30


def _rows(pairs: list[Pair], longest: int) -> list[_Row]:
    """Every pair once. Rows that several share hold at most 512 tokens, or twice their context, and
    `longest`: what attention takes grows with the square."""
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


def _score(model: Decoder, rows: list[_Row], device: torch.device) -> dict[Pair, Likelihood]:
    """One forward pass."""
    tokens, positions, mask, scored, targets = (
        None if part is None else part.to(device) for part in _inputs(rows)
    )
    assert scored is not None and targets is not None
    with _output_at(model, scored):
        logits = model(tokens, positions, mask)
    likelihoods, greedy = [], []
    step = max(1, CHUNK_LOGITS // logits.shape[-1])
    for start in range(0, len(targets), step):
        numbers, chosen = logits[start : start + step].float(), targets[start : start + step]
        total = numbers.logsumexp(-1)
        likelihoods.append(numbers.gather(1, chosen.unsqueeze(1)).squeeze(1) - total)
        greedy.append(numbers.argmax(-1) == chosen)
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
    """`tokens`, `positions` int64 `[rows, longest]`; `mask` bool `[rows, 1, longest, longest]`,
    None where no row has two continuations; `scored` int64 `[targets, 2]`, row and place whose
    logits are of the `targets`, int64 `[targets]`."""
    shape = (len(rows), max(row.inputs for row in rows))
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    branch = torch.full(shape, -1)  # 0: context, then the number of the continuation
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
def _output_at(model: Decoder, places: Tensor) -> Iterator[None]:
    """Within it the model's logits are those of `places` alone: `[targets, vocab]`."""

    def select(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][places[:, 0], places[:, 1]],)

    handle = model.lm_head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
