"""Searches the fastest way to run a config that fits into memory.

Candidates go from the fastest to the one that takes the least device memory: the base whole on
every GPU, activations computed again, everything sharded, the base in host memory, activations
there too, the optimizer there too, the base on disk. `search` predicts their memory by dry runs and
their time by a roofline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby

from qfsdp.common.errors import UserError
from qfsdp.planning.changes import (
    CHECKPOINTING,
    OFFLOAD,
    Changes,
    micro_batches,
    strategy_over_all_ranks,
)
from qfsdp.planning.hardware import Hardware
from qfsdp.planning.predict import Predict, Prediction, between

# The faster one first. "shard_grad_op" is left out: it gathers as much of a frozen base as "ddp"
# holds, and keeps its shards besides (a step of Llama-3-70B on 2 GPUs: 69.6 GiB instead of 50.0).
# Over several machines, "hybrid_full_shard" gathers within each, and only gradients travel.
STRATEGIES = ("ddp", "hybrid_full_shard", "full_shard")


@dataclass(frozen=True)
class Candidate:
    """One way to run the config.

    Fields:
        strategy: one of STRATEGIES.
        checkpointing: one of CHECKPOINTING.
        offload: a key of OFFLOAD.
        offload_activations: `activation.offload`.
        tiles: the feed-forward is computed in tiles, `activation.tile_tokens: auto`.
        context_parallel: `sharding.context_parallel`.
    """

    strategy: str
    checkpointing: str
    offload: str = "none"
    offload_activations: bool = False
    tiles: bool = False
    context_parallel: int = 1

    @property
    def changes(self) -> Changes:
        shares = self.context_parallel > 1  # 1: as the config has it
        unsplit = self.strategy == "ddp" or self.offload == "all_to_cpu"  # "split" is refused there
        return {
            **strategy_over_all_ranks(self.strategy),
            **OFFLOAD[self.offload],
            **({"sharding.vocabulary": "auto"} if unsplit else {}),
            "activation.checkpointing": self.checkpointing,
            "activation.offload": self.offload_activations,
            "activation.tile_tokens": "auto" if self.tiles else None,
            **({"sharding.context_parallel": self.context_parallel} if shares else {}),
        }

    @property
    def name(self) -> str:
        """ "full_shard, checkpointing full, offload_base cpu"."""
        keys = {
            "base_to_cpu": "offload_base cpu",
            "all_to_cpu": "cpu_offload",
            "base_to_disk": "offload_base disk",
        }
        parts = [self.strategy, f"checkpointing {self.checkpointing}"]
        if self.offload != "none":
            parts.append(keys[self.offload])
        parts += ["tiles"] * self.tiles
        if self.context_parallel > 1:
            parts.append(f"context_parallel {self.context_parallel}")
        return ", ".join(parts + ["activation.offload"] * self.offload_activations)

    def is_faster_in_all(self, other: Candidate) -> bool:
        """Whether every field is as fast as in `other`, or faster."""
        orders = (STRATEGIES, CHECKPOINTING, tuple(OFFLOAD), (False, True), (False, True))
        pairs = zip(orders, astuple(self), astuple(other), strict=False)
        faster = all(order.index(mine) <= order.index(its) for order, mine, its in pairs)
        return faster and self.context_parallel <= other.context_parallel


def candidates(
    world_size: int, machines: int = 1, tiles: bool = False, shared: Sequence[int] = ()
) -> list[Candidate]:
    """The ways to try, the fastest first; those that differ only in checkpointing are adjacent.

    Args:
        tiles: whether rows are long enough for tiles (`Predictor.takes_tiles`). They come before
            any offload, and all that is offloaded has them.
        shared: by how many ranks long rows may be shared, above 1.
    """
    strategies = STRATEGIES if world_size > 1 else ("full_shard",)
    sharded = [s for s in strategies if s != "ddp" and (machines > 1 or s == "full_shard")]
    found = []
    for group in (["ddp"] if "ddp" in strategies else []), sharded:
        found += [Candidate(s, c) for s in group for c in CHECKPOINTING]
        found += [Candidate(s, "full", tiles=True) for s in group if tiles]
    found += [Candidate(s, "full", "none", True, tiles) for s in sharded]
    for s in sharded:
        modes = ("full",) if tiles else CHECKPOINTING
        found += [Candidate(s, c, "base_to_cpu", False, tiles) for c in modes]
        found += [Candidate(s, "full", "base_to_cpu", True, tiles)]
    for parts in shared:
        for acts in (False, True):
            found += [Candidate(s, "full", "none", acts, tiles, parts) for s in sharded]
    for offload in ("all_to_cpu", "base_to_disk"):
        ways = ((s, acts) for s in sharded for acts in (False, True))
        found += [Candidate(s, "full", offload, acts, tiles) for s, acts in ways]
    return found


@dataclass(frozen=True)
class Trial:
    """A candidate that was tried.

    Fields:
        batch: its largest micro-batch that fits; 1 if none fits.
        prediction: for that micro-batch.
        fits: whether it fits.
        whole: whether the micro-batch holds all samples of a step.
    """

    candidate: Candidate
    batch: int
    prediction: Prediction
    fits: bool
    whole: bool


def search(
    ways: Sequence[Candidate], predict: Predict, samples: int, hardware: Hardware
) -> Iterator[Trial]:
    """Tries candidates in their order, without those that cannot be the best.

    Left out are:

    * those slower in all than one that takes a whole step as one micro-batch: they only trade
      speed for memory;
    * weaker checkpointing, where not even one sample fits with the strongest;
    * a base on disk, where a base in host memory fits, or where the device is too small for both.

    Args:
        ways: as `candidates` returns them.
        samples: of one rank in one step; the sizes of micro-batches divide it. Ranks that share
            rows have those of all of them.
    """
    tried: list[Trial] = []
    for _, group in groupby(ways, key=lambda way: replace(way, checkpointing="")):
        useful = [way for way in group if not any(_rules_out(t, way, hardware) for t in tried)]
        if not useful:
            continue
        try:
            of_group = samples * useful[-1].context_parallel
            least = predict(useful[-1].changes | micro_batches(1, of_group))
        except UserError:
            if useful[-1].offload != "none":
                continue  # nothing is frozen, or the model does not have it
            raise
        if not least.fits(hardware):
            tried.append(Trial(useful[-1], 1, least, fits=False, whole=False))
            yield tried[-1]
            continue
        for way in useful:
            if not any(_rules_out(trial, way, hardware) for trial in tried):
                tried.append(largest_batch(way, predict, samples * way.context_parallel, hardware))
                yield tried[-1]


def _rules_out(trial: Trial, way: Candidate, hardware: Hardware) -> bool:
    """Whether `way` cannot be better, because of an earlier trial."""
    if trial.whole and trial.candidate.is_faster_in_all(way):
        return True
    if way.offload == "base_to_disk" and trial.candidate == replace(way, offload="base_to_cpu"):
        return trial.fits or not trial.prediction.fits_device(hardware)
    return False


def divisors(number: int) -> list[int]:
    """The divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def largest_batch(way: Candidate, predict: Predict, samples: int, hardware: Hardware) -> Trial:
    """Finds the largest micro-batch that fits; its size divides `samples`, those of a step.

    Memory is a constant plus a part per sample. So the predictions for one sample and for all of
    them tell which sizes to try; a size counts only if its own prediction fits.
    """

    def at(size: int) -> Prediction:
        return predict(way.changes | micro_batches(size, samples))

    def trial(size: int) -> Trial:
        fits = at(size).fits(hardware)
        return Trial(way, size, at(size), fits, whole=fits and size == samples)

    if not at(1).fits(hardware) or at(samples).fits(hardware):
        return trial(samples if at(1).fits(hardware) else 1)
    for size in reversed(divisors(samples)[1:-1]):
        share = (size - 1) / (samples - 1)
        if between(at(1), at(samples), share).fits(hardware) and at(size).fits(hardware):
            return trial(size)
    return trial(1)
