"""Several datasets as one, in given proportions."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping
from typing import Any

from qfsdp.cli.errors import UserError
from qfsdp.data.components import build_dataset, parts_of
from qfsdp.data.loader import MapDataset
from qfsdp.data.packing import sample_lengths
from qfsdp.data.shuffling import shuffled_indices

log = logging.getLogger("qfsdp")


class MixtureDataset:
    """Chosen samples of several datasets, as items of theirs.

    Which samples, and in which order, is a function of the datasets' lengths, `counts` and `seed`,
    so it is the same on every rank. A dataset's samples come equally often, give or take one.

    Args:
        parts: datasets by name.
        counts: how many samples of each; more than it has repeats them.
        seed: of what is chosen, and of the order.
    """

    def __init__(
        self, parts: Mapping[str, MapDataset], counts: Mapping[str, int], seed: int
    ) -> None:
        self._parts = list(parts.values())
        chosen: list[tuple[int, int]] = []
        for at, (name, part) in enumerate(parts.items()):
            rounds, rest = divmod(counts[name], len(part))
            indices = [*range(len(part))] * rounds + _shuffled(len(part), f"{seed} {name}")[:rest]
            chosen += [(at, index) for index in indices]
        # So that the first so many are a mixture, too, where nobody shuffles.
        order = _shuffled(len(chosen), f"{seed}")
        self._which = array("i", [chosen[i][0] for i in order])
        self._index = array("q", [chosen[i][1] for i in order])

    def __len__(self) -> int:
        return len(self._which)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        of_parts = [sample_lengths(part) for part in self._parts]
        return [of_parts[at][index] for at, index in zip(self._which, self._index, strict=True)]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._parts[self._which[index]][self._index[index]]


def mixed_dataset(
    tokenizer: Any,
    *,
    sets: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> MixtureDataset:
    """Several datasets as one:

        dataset:
          _component_: qfsdp.data.mixed_dataset
          sets:
            maths: {_component_: qfsdp.data.gsm8k_dataset}
            chat: {_component_: qfsdp.data.guanaco_dataset, source: chat.jsonl}
          weights: {maths: 1, chat: 3}

    The choice of samples is made once, and every epoch has the same: to see more of a large set,
    make `samples` larger instead of `epochs`.

    Args:
        tokenizer: for all of them.
        sets: name -> dataset, as a config names one.
        weights: name -> share of the samples, any positive numbers; null: every set once.
        samples: of all sets together, which is an epoch. By default as many as there are before a
            set would repeat samples.
        seed: of what is chosen of a set that is not used whole.

    Raises:
        UserError: a set or weight is wrong, or a set cannot be built; the message has its name.
    """
    _check_weights(sets, weights, samples)
    parts = {
        name: build_dataset(f"dataset.sets.{name}", part, tokenizer)
        for name, part in parts_of("dataset", sets).items()
    }
    sizes = {name: len(part) for name, part in parts.items()}
    shares = {name: float(share) for name, share in (weights or sizes).items()}
    if samples is None:
        fewest = min(sizes[name] / share for name, share in shares.items())
        samples = max(1, math.floor(fewest * sum(shares.values()) + 1e-6))
    counts = apportion({name: shares[name] for name in parts}, samples)
    told = (f"{name} {count} of {sizes[name]}" for name, count in counts.items())
    unlike = any(counts[name] != size for name, size in sizes.items())
    level = logging.WARNING if unlike else logging.INFO
    log.log(level, "mixed: %d samples: %s", samples, ", ".join(told))
    return MixtureDataset(parts, counts, seed)


def apportion(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` in whole numbers, in proportion to `shares`; the largest remainders round up."""
    exact = {name: total * share / sum(shares.values()) for name, share in shares.items()}
    counts = {name: math.floor(number + 1e-6) for name, number in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def _check_weights(
    sets: Mapping[str, Any], weights: Mapping[str, float] | None, samples: int | None
) -> None:
    if not isinstance(sets, Mapping) or not sets:
        raise UserError(f"dataset.sets: {sets!r}; a mapping of names to datasets is right")
    if samples is not None and samples < 1:
        raise UserError(f"dataset.samples: {samples}; at least 1, or null, is right")
    if weights is None:
        return
    if not isinstance(weights, Mapping) or weights.keys() != sets.keys():
        right = f"one for each of {', '.join(sets)} is right"
        raise UserError(f"dataset.weights: {weights}; {right}")
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or not weight > 0:
            raise UserError(f"dataset.weights.{name}: {weight!r}; a number above 0 is right")


def _shuffled(size: int, key: str) -> list[int]:
    indices: list[int] = shuffled_indices(size, f"mixed {key}").tolist()
    return indices
