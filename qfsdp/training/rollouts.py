"""Answers drawn from the model that trains, as batches: for rejection sampling, GRPO and the like.

    groups = sample(model, tokenizer, prompts, stops, world, k=8, sampling=SamplingConfig(...))
    rows = [answer.row() for group in groups for answer in group]
    batches = micro_batches(rows, world, batch_size=16, pad_id=tokenizer.pad_id)

    def loss_of(batch):
        logprobs = token_logprobs(model, batch)
        return -(per_row(advantages, batch) * logprobs.sum(1)).sum() / len(rows)

`forward_backward` and `optim_step` (`qfsdp.training.steps`) train on them. Everything but the
batches is the same on every rank, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.loader import Shares
from qfsdp.distributed.world import World
from qfsdp.evaluation.generation import SamplingConfig, generate_all
from qfsdp.modules.transformer import Decoder


@dataclass(frozen=True)
class Answer:
    """An answer that the model has drawn.

    Fields:
        prompt: its tokens.
        tokens: the answer's, with the token that ended it.
        text: the answer without that token.
        ended: false if it was cut at `max_new_tokens`.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    ended: bool

    def row(self) -> dict[str, list[int]]:
        """A sample for `micro_batches`, whose targets are the answer's tokens."""
        labels = [IGNORE_INDEX] * len(self.prompt) + self.tokens
        return {"tokens": self.prompt + self.tokens, "labels": labels}


def sample(
    model: Decoder,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    stop_ids: set[int],
    world: World,
    *,
    k: int = 1,
    sampling: SamplingConfig | None = None,
    batch_size: int = 32,
) -> list[list[Answer]]:
    """Draws `k` answers to each prompt from the model as it is now: sharded, with its adapters.

    Every rank must call it, with the same prompts, and gets all answers. They depend on the seed,
    the prompt and the weights, not on the number of ranks. Dropout is off, keys and values are
    cached, and the model's mode is restored.

    Args:
        prompts: tokens of each, of `prompt_tokens` for example.
        stop_ids: tokens that end an answer, of `stop_ids` for example.
        sampling: temperature, top_p, longest answer and seed; None: temperature 1. The same seed
            draws the same answers from the same weights: give every update another one.
        batch_size: answers that a rank draws at a time.

    Raises:
        UserError: as `generate`.
    """
    sampling = sampling or SamplingConfig(temperature=1.0)
    each = [prompt for prompt in prompts for _ in range(k)]
    draws = [draw for _ in prompts for draw in range(k)]
    found = generate_all(
        model, each, sampling, stop_ids, world, batch_size, draws=draws, keep_stop=True
    )
    answers = []
    for prompt, tokens in zip(each, found, strict=True):
        ended = bool(tokens) and tokens[-1] in stop_ids
        text = tokenizer.decode(tokens[:-1] if ended else tokens)
        answers.append(Answer(prompt, tokens, text, ended))
    return [answers[start : start + k] for start in range(0, len(answers), k)]


def micro_batches(
    rows: Sequence[Mapping[str, Any]],
    world: World,
    *,
    batch_size: int,
    pad_id: int,
    max_seq_len: int | None = None,
) -> list[Batch]:
    """This rank's part of the samples of one update, padded; all ranks get as many batches.

    Args:
        rows: `tokens` and `labels` of each sample, the same on every rank. Neighbours share a
            batch, so samples of similar length should be neighbours.
        batch_size: samples per rank and micro-batch.
        max_seq_len: longer samples lose their end; None: no limit.

    Returns:
        Batches whose `samples` say which of `rows` each of their rows is. A rank that is left
        without samples gets a batch of padding.
    """
    shares = Shares(
        batch_size=batch_size,
        gradient_accumulation_steps=1,
        rank=world.rank,
        world_size=world.size,
        pad_id=pad_id,
        max_seq_len=max_seq_len,
    )
    return shares.of_rank(range(len(rows)), rows.__getitem__, lambda index: (index,))


def per_row(values: Sequence[float], batch: Batch) -> Tensor:
    """The value of each row's sample, fp32 `[rows]` on the batch's device; 0 for padding.

    Args:
        values: of all samples that `micro_batches` was given, such as advantages.
    """
    found = torch.zeros(len(batch.tokens))
    for row, (index,) in enumerate(batch.samples):
        found[row] = values[index]
    return found.to(batch.tokens.device)


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """The log-probability of every target: fp32 `[rows, seq]`, 0 where there is none. With
    gradients, unless they are switched off. Whole logits never exist."""
    positions = torch.arange(batch.tokens.numel(), device=batch.tokens.device)
    losses: Tensor = model(
        batch.tokens,
        batch.positions,
        labels=batch.labels,
        cu_seqlens=batch.documents,
        sample_ids=positions.view_as(batch.tokens),  # each token is a sample of its own
        num_samples=positions.numel(),
    )
    return -losses.view_as(batch.tokens)
