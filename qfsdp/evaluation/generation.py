"""Generates answers to prompts: greedy, or with temperature and nucleus sampling.

Nucleus sampling is top-p (arXiv:1904.09751). The random numbers of a prompt depend only on the seed
and the prompt's tokens, not on its batch or rank.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.progress import moved
from qfsdp.data.token_ids import check_ids
from qfsdp.distributed.world import World
from qfsdp.evaluation.batching import batches_by_length, batches_of_rank
from qfsdp.evaluation.inference_model import evaluating
from qfsdp.modules.attention.kv_cache import KVCache
from qfsdp.modules.hub_models.cache import HubCache
from qfsdp.modules.hub_models.config import AnyConfig
from qfsdp.modules.hub_models.decoder import AnyDecoder, HubDecoder
from qfsdp.tensor_subclasses import few_rows

LEAST_TEMPERATURE = 1e-30  # logits divided by less would be infinite in fp32
NO_TOKEN = -1  # logits are no numbers
NOT_FINITE = (
    "the model's logits are NaN or infinity; expected finite numbers: fp16 may be too small for "
    "this model, and model.dtype=bf16 or fp32 is not"
)


@dataclass
class SamplingConfig:
    """Section `sampling`: how to generate answers.

    Fields:
        max_new_tokens: longest answer in tokens.
        temperature: divides the logits. 0 always takes the most likely token (greedy).
        top_p: draws from the most likely tokens that together have this probability (the nucleus).
            1 draws from all tokens.
        seed: seed of the random numbers. The same prompt and seed give the same answer. Null draws
            another seed each time.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = 0

    def check(self) -> None:
        check_bounds(self, "max_new_tokens", least=1)
        check_bounds(self, "seed", least=0)
        if not 0.0 <= self.temperature < float("inf"):
            raise InvalidField("temperature", self.temperature, "a number of at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidField("top_p", self.top_p, "a probability above 0, at most 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < LEAST_TEMPERATURE


def generate(
    model: AnyDecoder,
    prompts: list[list[int]],
    sampling: SamplingConfig,
    stop_ids: set[int],
    world: World,
    on_tokens: Callable[[list[int | None]], None] | None = None,
    draws: Sequence[int] | None = None,
    keep_stop: bool = False,
) -> list[list[int]]:
    """Answers a batch of prompts.

    Every rank must call it, each with its own prompts or with none. A sharded model gathers its
    layers on all ranks together, so all ranks run it until the last one has its answers. The
    model's mode (`train` or `eval`) stays as it was.

    Args:
        prompts: tokens of each prompt, at least one. Lengths may differ.
        stop_ids: tokens that end an answer.
        on_tokens: called after each step with the new token of each prompt, or None for a prompt
            whose answer has ended.
        draws: for each prompt, which draw of that prompt it is: two draws have other random
            numbers. None: 0.
        keep_stop: answers keep the token that ended them.

    Returns:
        The new tokens of each prompt, without the token that ended it.

    Raises:
        UserError: a prompt is empty, or a prompt and its answer may need more positions than the
            model has; or logits are not finite.
    """
    check_lengths(prompts, sampling, model)
    together = any(isinstance(module, FSDPModule) for module in model.modules())
    with evaluating(model):  # dropout must be off
        randoms = prompt_randoms(prompts, sampling, draws)
        kept = stop_ids if keep_stop else set()
        return _generate(
            model, prompts, sampling, stop_ids, world, together, on_tokens, randoms, kept
        )


def generate_all(
    model: AnyDecoder,
    prompts: list[list[int]],
    sampling: SamplingConfig,
    stop_ids: set[int],
    world: World,
    batch_size: int,
    title: str = "answers",
    draws: Sequence[int] | None = None,
    keep_stop: bool = False,
) -> list[list[int]]:
    """Answers any number of prompts, with a progress bar.

    Batches of prompts of similar length are split over the ranks. Every rank gets all answers, in
    the order of the prompts.

    Args:
        prompts: the same on every rank.
        batch_size: prompts that a rank answers at a time.
        title: title of the progress bar.
        draws, keep_stop: as in `generate`.
    """
    draws = draws or [0] * len(prompts)
    found: dict[int, list[int]] = {}
    batches = batches_by_length([len(prompt) for prompt in prompts], batch_size)
    for chosen in batches_of_rank(batches, world, title):
        mine = [prompts[index] for index in chosen]
        of_mine = [draws[index] for index in chosen]
        answers = generate(
            model, mine, sampling, stop_ids, world, draws=of_mine, keep_stop=keep_stop
        )
        found.update(zip(chosen, answers, strict=True))
    for of_rank in world.gather(found):
        found.update(of_rank)
    return [found[index] for index in range(len(prompts))]


def check_lengths(prompts: list[list[int]], sampling: SamplingConfig, model: AnyDecoder) -> None:
    """Raises the UserErrors of `generate` without generating."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} of {len(prompts)}: no tokens; expected at least one")
        check_ids(f"prompt {number}", prompt, model.config.vocab_size)
        positions = model.config.most_positions(len(prompt))
        if len(prompt) + sampling.max_new_tokens > positions:
            raise UserError(
                f"sampling.max_new_tokens: {sampling.max_new_tokens} after {len(prompt)} tokens "
                f"of prompt {number}; expected at most {positions_of(model.config, positions)}"
            )


def positions_of(config: AnyConfig, positions: int) -> str:
    """The limit of a prompt and its answer, for messages."""
    if positions == config.max_position_embeddings:
        return f"the model's {positions} positions together"
    return (
        f"{positions} tokens together, the original context of LongRoPE, which an answer cannot "
        "cross: all of the text would be turned in another way"
    )


def _generate(
    model: AnyDecoder,
    prompts: list[list[int]],
    sampling: SamplingConfig,
    stop_ids: set[int],
    world: World,
    together: bool,
    on_tokens: Callable[[list[int | None]], None] | None,
    randoms: Tensor,
    kept: set[int],
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt of each row of the batch
    randoms = randoms.to(world.device)
    cache, tokens = start(model, prompts, sampling.max_new_tokens, world.device)
    for step in range(sampling.max_new_tokens):
        if not (world.max(len(rows)) if together else rows):
            break
        if not rows:
            # Without prompts it runs along with the other ranks.
            cache, tokens = start(model, [], sampling.max_new_tokens, world.device)
        with few_rows.generating():
            logits = model(tokens, cache=cache)
        moved()
        if not rows:
            continue
        tokens = sample_tokens(logits, randoms[rows, step], sampling)
        found = tokens.tolist()
        if NO_TOKEN in found:
            raise UserError(NOT_FINITE)
        going = [at for at, token in enumerate(found) if token not in stop_ids]
        new: list[int | None] = [None] * len(prompts)
        for at in going:
            new[rows[at]] = found[at]
            answers[rows[at]].append(found[at])
        for at, token in enumerate(found):
            if token in kept:
                answers[rows[at]].append(token)
        if on_tokens is not None:
            on_tokens(new)
        if going and len(going) < len(rows):
            cache.keep(going)
        rows = [rows[at] for at in going]
        tokens = tokens[going].unsqueeze(1)
    return answers


def start(
    model: AnyDecoder, prompts: list[list[int]], new_tokens: int, device: torch.device
) -> tuple[KVCache | HubCache, Tensor]:
    """An empty cache with space for `new_tokens` tokens, and the prompts, padded on the right.
    Without prompts, a single token."""
    prompts = prompts or [[0]]
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    if isinstance(model, HubDecoder):
        return HubCache(lengths), tokens.to(device)
    return KVCache(model.config, lengths, new_tokens, device), tokens.to(device)


def prompt_randoms(
    prompts: list[list[int]], sampling: SamplingConfig, draws: Sequence[int] | None = None
) -> Tensor:
    """A random number in [0, 1) for each token of each answer: fp32 `[prompts, max_new_tokens]`."""
    randoms = torch.empty(len(prompts), sampling.max_new_tokens)
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    for row, prompt, draw in zip(randoms, prompts, draws or [0] * len(prompts), strict=True):
        key = f"{seed}/{prompt}" + (f"/{draw}" if draw else "")
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        row.uniform_(generator=generator)
    return randoms


def sample_tokens(logits: Tensor, draws: Tensor, sampling: SamplingConfig) -> Tensor:
    """The next token of every row: int64 `[batch]`; `NO_TOKEN` where logits are not finite.

    Args:
        logits: `[batch, vocab]`, floating point.
        draws: fp32 `[batch]` in [0, 1). A row's token is the first whose cumulative probability
            exceeds its draw.
    """
    if sampling.is_greedy:
        return likeliest(logits)
    probabilities = (logits.float() / sampling.temperature).softmax(-1)
    order = None
    if sampling.top_p < 1:
        probabilities, order = probabilities.sort(-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    sums = probabilities.double().cumsum(-1)
    # A draw is below 1 in fp32, so in fp64 it is below the total, and the token found has a
    # probability above 0.
    at = torch.searchsorted(sums, draws.double().unsqueeze(1) * sums[:, -1:], right=True)
    at.clamp_(max=logits.shape[-1] - 1)  # of sums that are NaN
    tokens = (at if order is None else order.gather(1, at)).squeeze(1)
    return tokens.masked_fill(sums[:, -1].isnan(), NO_TOKEN)


def likeliest(logits: Tensor) -> Tensor:
    """The most likely token of every row of `[batch, vocab]`; `NO_TOKEN` as in `sample_tokens`."""
    tokens = logits.argmax(-1)  # that of NaN if there is one
    largest = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens.masked_fill(~largest.isfinite(), NO_TOKEN)
