"""The ladder from the fastest way to run a config to the one that takes the least device memory.

Practitioners climb it by hand: the base whole on every GPU, activations computed again, everything
spread, the base in host memory, activations there too, the optimizer there too, the base on
disk. `climb` does it with predictions: memory by dry run, seconds by the roofline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby

from qfsdp.cli.errors import UserError
from qfsdp.memory.hardware import Hardware
from qfsdp.memory.predict import Changes, Predict, Prediction, between

# Values from the fastest to the one that takes the least device memory. "shard_grad_op" is not
# among them: of a frozen base it gathers what "ddp" has, and holds more, as its shards stay (for a
# step of Llama-3-70B on 2 GPUs 69.6 GiB instead of 50.0).
STRATEGIES = ("ddp", "full_shard")
CHECKPOINTING = ("none", "selective", "full")
# Where parameters lie: on the device; the base in host memory; all there, with the optimizer; the
# base on disk.
STORES: dict[str, Changes] = {
    "device": {"sharding.offload_base": "none", "sharding.cpu_offload": False},
    "cpu": {"sharding.offload_base": "cpu", "sharding.cpu_offload": False},
    "cpu_offload": {"sharding.offload_base": "none", "sharding.cpu_offload": True},
    "disk": {"sharding.offload_base": "disk", "sharding.cpu_offload": False},
}


def spread(strategy: str) -> Changes:
    """To a strategy over all ranks, from whatever there is."""
    return {"sharding.strategy": strategy, "sharding.replicate": None, "sharding.shard": None}


@dataclass(frozen=True)
class Rung:
    """One way to run the config; its values are those of the tuples above."""

    strategy: str
    checkpointing: str
    store: str = "device"
    offload_activations: bool = False

    @property
    def changes(self) -> Changes:
        return {
            **spread(self.strategy),
            **STORES[self.store],
            "activation.checkpointing": self.checkpointing,
            "activation.offload": self.offload_activations,
        }

    @property
    def name(self) -> str:
        """ "full_shard, checkpointing full, offload_base cpu"."""
        stores = {"cpu": "offload_base cpu", "disk": "offload_base disk"}
        parts = [self.strategy, f"checkpointing {self.checkpointing}"]
        if self.store != "device":
            parts.append(stores.get(self.store, self.store))
        return ", ".join(parts + ["activation.offload"] * self.offload_activations)

    def not_above(self, other: Rung) -> bool:
        """Whether nothing in here is slower than in `other`."""
        orders = (STRATEGIES, CHECKPOINTING, tuple(STORES), (False, True))
        pairs = zip(orders, astuple(self), astuple(other), strict=True)
        return all(order.index(mine) <= order.index(its) for order, mine, its in pairs)


def ladder(world_size: int) -> list[Rung]:
    """The rungs, the fastest first; those that differ in checkpointing only follow each other."""
    rungs = [Rung(s, c) for s in STRATEGIES if s != "ddp" or world_size > 1 for c in CHECKPOINTING]
    rungs += [Rung("full_shard", "full", "device", True)]
    rungs += [Rung("full_shard", checkpointing, "cpu") for checkpointing in CHECKPOINTING]
    rungs += [Rung("full_shard", "full", "cpu", True)]
    for store in ("cpu_offload", "disk"):
        rungs += [Rung("full_shard", "full", store, offload) for offload in (False, True)]
    return rungs


@dataclass(frozen=True)
class Found:
    """A rung that was tried.

    Fields:
        batch: its largest micro-batch that fits; 1 where none does.
        prediction: of that.
        fits: whether it fits.
        whole: whether it is all samples of a step.
    """

    rung: Rung
    batch: int
    prediction: Prediction
    fits: bool
    whole: bool


def climb(
    rungs: Sequence[Rung], predict: Predict, samples: int, hardware: Hardware
) -> Iterator[Found]:
    """Tries rungs in their order; leaves out what cannot be better.

    Args:
        samples: of one rank in one step; micro-batches are divisors of it.

    Left out are rungs above one that takes all samples at once, as they only trade speed for
    memory; other checkpointing where not even "full" lets one sample fit; and a base on disk where
    host memory is not what was short.
    """
    found: list[Found] = []
    for _, group in groupby(rungs, key=lambda rung: replace(rung, checkpointing="")):
        useful = [r for r in group if not any(_is_useless(r, before, hardware) for before in found)]
        if not useful:
            continue
        try:
            least = predict(useful[-1].changes | batch_of(1, samples))
        except UserError:
            if useful[-1].store in ("cpu", "disk"):
                continue  # nothing is frozen, so there is no base to be elsewhere
            raise
        if not least.fits(hardware):
            found.append(Found(useful[-1], 1, least, fits=False, whole=False))
            yield found[-1]
            continue
        for rung in useful:
            if not any(_is_useless(rung, before, hardware) for before in found):
                found.append(largest_batch(rung, predict, samples, hardware))
                yield found[-1]


def _is_useless(rung: Rung, before: Found, hardware: Hardware) -> bool:
    if before.whole and before.rung.not_above(rung):
        return True
    if rung.store == "disk" and before.rung == replace(rung, store="cpu"):
        return before.fits or not before.prediction.fits_device(hardware)
    return False


def batch_of(size: int, samples: int) -> Changes:
    """Micro-batches of `size`, as many as `samples` of a step take."""
    return {"batch_size": size, "gradient_accumulation_steps": samples // size}


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def largest_batch(rung: Rung, predict: Predict, samples: int, hardware: Hardware) -> Found:
    """The largest micro-batch that fits, of the divisors of a step's `samples`.

    Memory is a constant and a part per sample, so the predictions for one and for all samples say
    which size between them to try; that one counts only if its own prediction fits.
    """

    def at(size: int) -> Prediction:
        return predict(rung.changes | batch_of(size, samples))

    def result(size: int) -> Found:
        fits = at(size).fits(hardware)
        return Found(rung, size, at(size), fits, whole=fits and size == samples)

    if not at(1).fits(hardware) or at(samples).fits(hardware):
        return result(samples if at(1).fits(hardware) else 1)
    for size in reversed(divisors(samples)[1:-1]):
        share = (size - 1) / (samples - 1)
        if between(at(1), at(samples), share).fits(hardware) and at(size).fits(hardware):
            return result(size)
    return result(1)
