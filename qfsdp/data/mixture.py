"""A mixture of several datasets in given proportions."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from qfsdp.common.errors import UserError
from qfsdp.data.components import build_dataset, parts_of
from qfsdp.data.loader import MapDataset
from qfsdp.data.packing import sample_lengths
from qfsdp.data.reading import reads_rows
from qfsdp.data.shuffling import shuffled_indices

log = logging.getLogger("qfsdp")


class MixtureDataset:
    """Chosen samples of several datasets in random order.

    The choice and the order depend on the sizes of the datasets, on `counts` and on `seed`, so
    they are the same on every rank. How often two samples of a dataset are chosen differs by at
    most one.

    Args:
        parts: name -> dataset.
        counts: name -> number of samples to choose. Samples repeat if the dataset has fewer.
        seed: seed of the choice and of the order.

    Attributes:
        parts: as given.
    """

    def __init__(
        self, parts: Mapping[str, MapDataset], counts: Mapping[str, int], seed: int
    ) -> None:
        self.parts = dict(parts)
        self._parts = list(parts.values())
        chosen: list[tuple[int, int]] = []
        for at, (name, part) in enumerate(parts.items()):
            repeats, rest = divmod(counts[name], len(part))
            indices = [*range(len(part))] * repeats + _shuffled(len(part), f"{seed} {name}")[:rest]
            chosen += [(at, index) for index in indices]
        # The first samples are a mixture too, even if the loader does not shuffle.
        order = _shuffled(len(chosen), f"{seed}")
        self._part_numbers = array("i", [chosen[i][0] for i in order])
        self._indices = array("q", [chosen[i][1] for i in order])

    def __len__(self) -> int:
        return len(self._part_numbers)

    @property
    def chosen(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of the part and the index in it of every sample, int64 `[samples, 2]`."""
        return np.stack([np.asarray(self._part_numbers), np.asarray(self._indices)], 1)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        part_lengths = [sample_lengths(part) for part in self._parts]
        chosen = zip(self._part_numbers, self._indices, strict=True)
        return [part_lengths[at][index] for at, index in chosen]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._parts[self._part_numbers[index]][self._indices[index]]


@reads_rows
def mixed_dataset(
    tokenizer: Any,
    *,
    sets: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> MixtureDataset:
    """Mixes several datasets:

        dataset:
          _component_: qfsdp.data.mixed_dataset
          sets:
            maths: {_component_: qfsdp.data.gsm8k_dataset}
            chat: {_component_: qfsdp.data.guanaco_dataset, source: chat.jsonl}
          weights: {maths: 1, chat: 3}

    Samples are chosen once, and every epoch has the same ones. To see more of a large set, raise
    `samples` instead of `epochs`.

    Args:
        tokenizer: the tokenizer of all sets.
        sets: name -> dataset component.
        weights: name -> share of the samples, any positive numbers. Null takes each set once.
        samples: number of samples of all sets together, which is one epoch. Default: the largest
            number that repeats no sample.
        seed: seed of the choice and of the order.

    Raises:
        UserError: a set or a weight is wrong, or a set cannot be built. The message names the set.
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
    shown = (f"{name} {count} of {sizes[name]}" for name, count in counts.items())
    differs = any(counts[name] != size for name, size in sizes.items())
    level = logging.WARNING if differs else logging.INFO
    log.log(level, "mixture: %d samples: %s", samples, ", ".join(shown))
    return MixtureDataset(parts, counts, seed)


def apportion(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Splits `total` into whole numbers in proportion to `shares` (largest remainder method)."""
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
        raise UserError(f"dataset.sets: {sets!r}; expected a mapping of names to datasets")
    if samples is not None and samples < 1:
        raise UserError(f"dataset.samples: {samples}; expected an integer of at least 1, or null")
    if weights is None:
        return
    if not isinstance(weights, Mapping) or weights.keys() != sets.keys():
        expected = f"expected one for each of {', '.join(sets)}"
        raise UserError(f"dataset.weights: {weights}; {expected}")
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or not weight > 0:
            raise UserError(f"dataset.weights.{name}: {weight!r}; expected a number above 0")


def _shuffled(size: int, key: str) -> list[int]:
    indices: list[int] = shuffled_indices(size, f"mixed {key}").tolist()
    return indices
