"""Random samples of one length for benchmarks. Needs no file."""

from __future__ import annotations

from typing import Any

import torch

from qfsdp.common.errors import UserError
from qfsdp.data.shuffling import keyed_generator


class DummyDataset:
    """`samples` samples of `length` random tokens each. All tokens are trained.

    Items are `{"tokens", "labels"}`, each int64 `[length]`. They depend on `seed` and the index.
    """

    def __init__(self, samples: int, length: int, vocab_size: int, seed: int) -> None:
        self._samples, self._length = samples, length
        self._vocab_size, self._seed = vocab_size, seed

    def __len__(self) -> int:
        return self._samples

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [self._length] * self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = range(self._samples)[index]  # negative indices, and IndexError
        generator = keyed_generator(f"dummy {self._seed} {index}")
        tokens = torch.randint(self._vocab_size, (self._length,), generator=generator)
        return {"tokens": tokens, "labels": tokens}


def dummy_dataset(
    tokenizer: Any,
    *,
    length: int | None = None,
    samples: int = 10_000,
    vocab_size: int | None = None,
    seed: int = 0,
) -> DummyDataset:
    """Samples of one length with random tokens.

    Args:
        tokenizer: gives the defaults of `vocab_size` and `length`.
        length: tokens per sample. Default: the tokenizer's `max_seq_len`.
        samples: number of samples.
        vocab_size: token ids are drawn from 0 to `vocab_size - 1`.
        seed: seed of the token ids.

    Raises:
        UserError: a number is too small, or neither the config nor the tokenizer gives it.
    """
    numbers = {
        "length": getattr(tokenizer, "max_seq_len", None) or 0 if length is None else length,
        "samples": samples,
        "vocab_size": getattr(tokenizer, "vocab_size", 0) if vocab_size is None else vocab_size,
    }
    for name, number in numbers.items():
        least = 2 if name == "length" else 1
        if number < least:
            raise UserError(f"dataset.{name}: {number}; expected an integer of at least {least}")
    return DummyDataset(**numbers, seed=seed)
